/* Where the rows of a step are put down, and the hook that puts a gradient there: what `Recorder.measure` and
   `GradientHook` do in Python, without a Python frame. Right after a matrix product the caches are full of numbers,
   and every line of Python has to come from far away.

   Includes nothing: it is a part of _kernel.c. The owner is the recorder. */

#ifdef HAVE_CLOCK

static PyObject *str_slowly, *str_describe, *str_fault;

enum { SITE_SHIFT = 32 };

typedef struct {
    PyObject_HEAD
    PyObject *shapes;
    Latch *lock;
    Beat *owner;
    Clock *clock;
    Target target;
    int64_t capacity;
    Task *tasks;
    Piece *pieces;
    Py_ssize_t room;
} Tray;

typedef struct {
    PyObject_HEAD
    Tray *tray;
    PyObject *targets;
    double call_seconds;
} Hook;

static PyTypeObject *tray_type;

static int intern_names(void)
{
    const struct {
        PyObject **to;
        const char *name;
    } names[] = {{&str_slowly, "measure_slowly"}, {&str_describe, "describe"}, {&str_fault, "fault_at_gradient"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].to = PyUnicode_InternFromString(names[i].name)))
            return 0;
    return 1;
}

/* ---------------------------------------------------------------- the tray */

static int traverse_tray(PyObject *self, visitproc visit, void *arg)
{
    Tray *tray = (Tray *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(tray->owner);
    Py_VISIT(tray->shapes);
    Py_VISIT(tray->clock);
    return 0;
}

static int clear_tray(PyObject *self)
{
    Tray *tray = (Tray *)self;
    Py_CLEAR(tray->owner);
    Py_CLEAR(tray->shapes);
    Py_CLEAR(tray->lock);
    Py_CLEAR(tray->clock);
    return 0;
}

static void free_tray(PyObject *self)
{
    free(((Tray *)self)->tasks);
    free(((Tray *)self)->pieces);
    release_object(self, clear_tray);
}

static PyObject *make_tray(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *shapes;
    Latch *lock;
    Beat *owner;
    Clock *clock;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", beat_type, &owner, &PyList_Type, &shapes, latch_type, &lock, clock_type, &clock))
        return NULL;
    Tray *tray = allocate(type);
    if (!tray)
        return NULL;
    Py_INCREF(tray->owner = owner);
    Py_INCREF(tray->shapes = shapes);
    Py_INCREF(tray->clock = clock);
    Py_INCREF(tray->lock = lock);
    return (PyObject *)tray;
}

/* aim(capacity, row, hash, hist): where the rows are now. */
static PyObject *aim_tray(PyObject *self, PyObject *args)
{
    Tray *tray = (Tray *)self;
    unsigned long long row, hash, hist;
    long long capacity;
    if (!PyArg_ParseTuple(args, "LKKK", &capacity, &row, &hash, &hist))
        return NULL;
    tray->capacity = capacity;
    tray->target = (Target){(double *)(uintptr_t)row, (uint64_t *)(uintptr_t)hash, (uint32_t *)(uintptr_t)hist};
    Py_RETURN_NONE;
}

static int is_told_shape(PyObject *known, const Told *told)
{
    if (!PyTuple_Check(known) || PyTuple_Size(known) != told->dims)
        return 0;
    for (int i = 0; i < told->dims; i++)
        if (PyLong_AsLongLong(PyTuple_GetItem(known, i)) != told->shape[i])
            return 0;
    return 1;
}

/* Whether the site has been given this shape; a tensor without one has not. */
static int is_described(Tray *tray, PyObject *tensor, int64_t site, const Told *told)
{
    PyObject *known = PyList_GetItem(tray->shapes, site);
    if (known && told && told->dims >= 0)
        return is_told_shape(known, told);
    PyObject *shape = known ? PyObject_GetAttr(tensor, str_shape) : NULL;
    int same = shape ? PyObject_RichCompareBool(known, shape, Py_EQ) : 0;
    Py_XDECREF(shape);
    PyErr_Clear();
    return same == 1;
}

/* `told` may be NULL: then the tensor is asked. */
static int describe_site(Tray *tray, PyObject *tensor, int64_t site, const Told *told)
{
    if (is_described(tray, tensor, site, told))
        return 1;
    PyObject *number = PyLong_FromLongLong(site);
    PyObject *answer = number ? PyObject_CallMethodObjArgs((PyObject *)tray->owner, str_describe, number, tensor, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Measure a plain tensor into the next row. -1: not plain, nothing done; -2: with an error set. */
static int64_t put_down(Tray *tray, PyObject *keys, PyObject *tensor, int64_t key)
{
    Layout layout;
    Task task;
    Piece piece;
    Told told;
    Py_ssize_t row = PyList_Size(keys);
    if (row < 0)
        return -2;
    if (row >= tray->capacity ||
        !read_tensor_told(tensor, count_wants(&tray->target), &task, &layout, &told))
        return -1;
    if (!append_number(keys, key))
        return -2;
    int threads = choose_threads(count_bytes(&task), NULL);
    if (task.layout)
        measure_layout(&task, &layout, &piece, threads);
    else
        run_unlocked(&task, 1, &piece, count_bytes(&task), threads);
    write_target(&piece, &task, &tray->target, row);
    return describe_site(tray, tensor, key >> SITE_SHIFT, &told) ? row : -2;
}

static int64_t measure_slowly(Tray *tray, PyObject *tensor, int64_t key)
{
    PyObject *site = PyLong_FromLongLong(key >> SITE_SHIFT), *tag = PyLong_FromLongLong(key & 0xFFFFFFFF);
    PyObject *answer = site && tag ? PyObject_CallMethodObjArgs((PyObject *)tray->owner, str_slowly, tensor, site, tag, NULL) : NULL;
    int64_t row = answer ? PyLong_AsLongLong(answer) : -2;
    Py_XDECREF(site);
    Py_XDECREF(tag);
    Py_XDECREF(answer);
    return row;
}

/* Measure any tensor into the next row; -1 where it cannot be seen, -2 with an error set. */
static int64_t take_tensor(Tray *tray, PyObject *tensor, int64_t key)
{
    take_latch(tray->lock, -1);
    PyObject *keys = Py_NewRef(tray->owner->keys);
    int64_t row = put_down(tray, keys, tensor, key);
    if (row == -1)
        row = measure_slowly(tray, tensor, key);
    Py_DECREF(keys);
    give_latch(tray->lock);
    return row;
}

static PyObject *tray_measure(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!check_count(n, 3))
        return NULL;
    int64_t site = PyLong_AsLongLong(args[1]), tag = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    int64_t row = take_tensor((Tray *)self, args[0], site << SITE_SHIFT | tag);
    return row == -2 ? NULL : PyLong_FromLongLong(row);
}

/* Read tensors into tasks and tell their sites the shapes; return the positions that could not be read. */
static PyObject *read_keyed(Tray *tray, PyObject *tensors, PyObject *keys, Py_ssize_t n, Task *tasks)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < n; i++) {
        Told told;
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        int64_t key = PyLong_AsLongLong(PyList_GetItem(keys, i));
        int found = read_tensor_told(tensor, count_wants(&tray->target), &tasks[i], NULL, &told);
        if (!found)
            memset(&tasks[i], 0, sizeof *tasks);
        if ((found && !describe_site(tray, tensor, key >> SITE_SHIFT, &told)) || (!found && !append_number(left, i)))
            Py_CLEAR(left);
    }
    return left;
}

static Target shift_target(const Target *target, Py_ssize_t rows)
{
    return (Target){target->row + rows * STATS, target->hash ? target->hash + rows : NULL,
                    target->hist ? target->hist + rows * BINS : NULL};
}

/* Have memory for as many tensors, clean. It is kept: a large piece anew at each step would have malloc tidy up. */
static int make_room(Tray *tray, Py_ssize_t n)
{
    if (n > tray->room) {
        free(tray->tasks);
        free(tray->pieces);
        tray->tasks = malloc((size_t)n * sizeof *tray->tasks);
        tray->pieces = malloc((size_t)n * sizeof *tray->pieces);
        tray->room = tray->tasks && tray->pieces ? n : 0;
    }
    if (tray->room)
        memset(tray->tasks, 0, (size_t)n * sizeof *tray->tasks);
    return n <= tray->room;
}

/* The keys are those of the step already; with an error they are taken out again. */
static PyObject *put_down_many(Tray *tray, PyObject *all_keys, PyObject *tensors, PyObject *keys)
{
    Py_ssize_t n = PyTuple_Size(tensors), first = PyList_Size(all_keys) - n;
    PyObject *left = make_room(tray, n) ? read_keyed(tray, tensors, keys, n, tray->tasks) : PyErr_NoMemory();
    if (left) {
        Target target = shift_target(&tray->target, first);
        measure_tasks(tray->tasks, n, tray->pieces, &target, NULL);
    } else {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyList_SetSlice(all_keys, first, first + n, NULL);
        PyErr_Restore(type, value, trace);
    }
    return left;
}

/* measure_many(tensors, keys): the caller holds the lock. */
static PyObject *tray_measure_many(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Tray *tray = (Tray *)self;
    if (!check_count(n, 2))
        return NULL;
    PyObject *tensors = PySequence_Tuple(args[0]), *keys = Py_NewRef(tray->owner->keys), *left = NULL;
    Py_ssize_t first = PyList_Size(keys), count = tensors ? PyTuple_Size(tensors) : -1;
    if (first >= 0 && count >= 0 && PyList_Size(args[1]) == count) {
        if (first + count > tray->capacity)
            Py_INCREF(left = Py_None);
        else if (PyList_SetSlice(keys, first, first, args[1]) == 0)
            left = put_down_many(tray, keys, tensors, args[1]);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "as many keys as tensors");
    Py_XDECREF(tensors);
    Py_XDECREF(keys);
    return left;
}

static PyMethodDef tray_methods[] = {
    {"aim", aim_tray, METH_VARARGS, "aim(capacity, row, hash, hist)\n\nTell where the rows of the step begin."},
    FAST("measure", tray_measure,
         "measure(tensor, site, tag) -> int\n\nMeasure a tensor into the next row; -1 where it cannot be seen."),
    FAST("measure_many", tray_measure_many,
         "measure_many(tensors, keys) -> list | None\n\n"
         "Measure tensors into the next rows, each under its key, while the owner's lock is held; return the positions\n"
         "left to the caller, or None, with nothing done, where there is no room."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tray_slots[] = {
    {Py_tp_doc, "Tray(owner, shapes, lock, clock)\n\nPuts tensors down as rows of the owner's step."},
    {Py_tp_new, make_tray},
    {Py_tp_dealloc, free_tray},
    {Py_tp_traverse, traverse_tray},
    {Py_tp_clear, clear_tray},
    {Py_tp_methods, tray_methods},
    {0, NULL},
};

static PyType_Spec tray_spec = {
    "clew.stats._kernel.Tray", sizeof(Tray), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tray_slots,
};

/* ---------------------------------------------------------------- the hook */

static int traverse_hook(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Hook *)self)->tray);
    Py_VISIT(((Hook *)self)->targets);
    return 0;
}

static int clear_hook(PyObject *self)
{
    Py_CLEAR(((Hook *)self)->tray);
    Py_CLEAR(((Hook *)self)->targets);
    return 0;
}

static void free_hook(PyObject *self)
{
    release_object(self, clear_hook);
}

static PyObject *make_hook(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tray, *targets;
    double seconds;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!d", tray_type, &tray, &PyList_Type, &targets, &seconds))
        return NULL;
    Hook *hook = allocate(type);
    if (hook) {
        Py_INCREF(hook->tray = (Tray *)tray);
        Py_INCREF(hook->targets = targets);
        hook->call_seconds = seconds;
    }
    return (PyObject *)hook;
}

/* Give another site the numbers of an earlier row. */
static int repeat_row(Tray *tray, PyObject *tensor, int64_t row, int64_t key)
{
    take_latch(tray->lock, -1);
    PyObject *keys = tray->owner->keys, *pair = Py_BuildValue("nL", PyList_Size(keys), (long long)row);
    int done = pair && PyList_Append(tray->owner->copies, pair) == 0 && append_number(keys, key) &&
               describe_site(tray, tensor, key >> SITE_SHIFT, NULL);
    Py_XDECREF(pair);
    give_latch(tray->lock);
    return done;
}

static int take_gradient(Hook *hook, PyObject *gradient)
{
    int64_t row = -1;
    for (Py_ssize_t i = 0; i < PyList_Size(hook->targets); i++) {
        int64_t key = PyLong_AsLongLong(PyList_GetItem(hook->targets, i));
        if (row < 0)
            row = take_tensor(hook->tray, gradient, key);
        else if (!repeat_row(hook->tray, gradient, row, key))
            return 0;
        if (row == -2)
            return 0;
    }
    return 1;
}

/* A fault of ours is told to the owner and goes no further; an interrupt is the user's. */
static int answer_fault(Hook *hook)
{
    PyObject *type, *value, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return 0;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace)
        PyException_SetTraceback(value, trace);
    PyObject *first = PyList_GetItem(hook->targets, 0);
    PyObject *answer = PyObject_CallMethodObjArgs((PyObject *)hook->tray->owner, str_fault, value, first, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(answer);
    return answer != NULL;
}

static PyObject *call_hook(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Hook *hook = (Hook *)self;
    PyObject *gradient = PyTuple_GetItem(args, 0);
    (void)kwargs;
    if (!gradient)
        return NULL;
    const Beat *owner = hook->tray->owner;
    if (gradient == Py_None || owner->asleep != Py_False || owner->due != Py_True)
        Py_RETURN_NONE;
    Clock *clock = hook->tray->clock;
    int before = switch_phase(clock, clock->own);
    int fine = take_gradient(hook, gradient) || answer_fault(hook);
    charge_seconds(clock, hook->call_seconds);
    switch_phase(clock, before);
    if (!fine)
        return NULL;
    Py_RETURN_NONE;
}

static PyType_Slot hook_slots[] = {
    {Py_tp_doc, "Hook(tray, keys, call_seconds)\n\nPuts the gradient it is called with down under each key."},
    {Py_tp_new, make_hook},
    {Py_tp_dealloc, free_hook},
    {Py_tp_traverse, traverse_hook},
    {Py_tp_clear, clear_hook},
    {Py_tp_call, call_hook},
    {0, NULL},
};

static PyType_Spec hook_spec = {
    "clew.stats._kernel.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, hook_slots,
};
#endif
