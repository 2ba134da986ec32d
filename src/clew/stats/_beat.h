/* The steps of a loop in which nothing is new: their events go by here without a Python frame. A quiet step is one of
   these that is not recorded in full. Whatever is unusual is left, untouched, to the general way in Python, which does the
   same and more.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

enum { FIRST_STEPS = 16, SELDOM = 64 };

static PyObject *str_training, *str_loss, *str_cut, *str_keys, *str_copies, *str_log, *str_outgrown, *str_is_plain, *str_fail;

static int intern_beat_names(void)
{
    return (str_cut = PyUnicode_InternFromString("cut_rows")) && (str_keys = PyUnicode_InternFromString("keys")) &&
           (str_copies = PyUnicode_InternFromString("copies")) && (str_log = PyUnicode_InternFromString("_log")) &&
           (str_outgrown = PyUnicode_InternFromString("_outgrown")) &&
           (str_is_plain = PyUnicode_InternFromString("is_plain")) &&
           (str_fail = PyUnicode_InternFromString("fail_at_end"));
}

/* ---------------------------------------------------------------- the end of a step */

static int may_end_quietly(const Beat *beat)
{
    int due = beat->due == Py_True;
    long step = read_long(beat->step), longest = due ? beat->most_recorded : beat->longest_backlog;
    return PyObject_TypeCheck(beat->schedule, ledger_type) && beat->closing == Py_True && beat->prompt == Py_False &&
           beat->is_followed == Py_False && (due ? Py_TYPE(beat->tray) == tray_type : is_empty(beat->keys)) &&
           is_empty(beat->waiting) && is_empty(beat->on_end) &&
           (is_empty(beat->on_seldom) || (step >= FIRST_STEPS && (step + 1) % SELDOM)) &&
           PyList_Size(beat->backlog) + 1 < longest && read_seconds() < beat->quiet_until;
}

static PyObject *describe_step(const Beat *beat, PyObject *phases, PyObject *rows)
{
    return PyTuple_Pack(8, beat->step, beat->due, phases, PyTuple_GetItem(rows, 0), PyTuple_GetItem(rows, 1),
                        PyTuple_GetItem(rows, 2), beat->scalars, beat->batches);
}

/* The rows of a step could not be cut: it goes on without any, and without the batches that refer to them. */
static PyObject *do_without_rows(Beat *beat)
{
    if (!is_ours())
        return NULL;
    PyObject *error = take_error();
    PyObject *answer = error ? PyObject_CallMethodObjArgs((PyObject *)beat, str_fail, error, NULL) : NULL;
    PyObject *batches = answer ? PyList_New(0) : NULL;
    if (batches)
        set_field(&beat->batches, batches);
    Py_XDECREF(error);
    Py_XDECREF(answer);
    return batches ? Py_NewRef(beat->no_rows) : NULL;
}

/* Lists in the place of those that were handed over. */
static int begin_lists(Beat *beat)
{
    PyObject **fields[] = {&beat->scalars, &beat->batches, &beat->keys, &beat->copies, &beat->handles};
    int due = beat->due == Py_True;
    for (int i = 0; i < (due ? 5 : 2); i++) {
        PyObject *list = PyList_New(0);
        if (!list)
            return 0;
        set_field(fields[i], list);
    }
    if (due) {
        PyDict_Clear(beat->latest_rows);
        PyDict_Clear(beat->counts);
    }
    return 1;
}

static int begin_next(Beat *beat)
{
    set_field(&beat->losses, PyLong_FromLong(0));
    set_flag(&beat->closing, 0);
    if (!begin_lists(beat) || !count_up(&beat->ended) || !count_up(&beat->step) || !count_up(&beat->serial))
        return 0;
    Ledger *ledger = (Ledger *)beat->schedule;
    long step = read_long(beat->step);
    int due = is_due_at(ledger, step);
    set_flag(&beat->due, due);
    set_flag(&beat->probing, due && is_probed_at(ledger, step));
    return 1;
}

static int is_empty_list(PyObject *owner, PyObject *name)
{
    PyObject *list = PyObject_GetAttr(owner, name);
    int empty = list && is_empty(list);
    Py_XDECREF(list);
    return empty;
}

/* Whether the rows are what those of the step before were, and none waits for a device. */
static int has_same_rows(const Beat *beat)
{
    PyObject *keys = PyObject_GetAttr(beat->layout, str_keys), *copies = PyObject_GetAttr(beat->layout, str_copies);
    int same = keys && copies && PyObject_RichCompareBool(keys, beat->keys, Py_EQ) == 1 &&
               PyObject_RichCompareBool(copies, beat->copies, Py_EQ) == 1 && is_empty_list(beat->rows, str_log) &&
               is_empty_list(beat->rows, str_outgrown);
    Py_XDECREF(keys);
    Py_XDECREF(copies);
    return same;
}

/* The rows of the step as `Recorder.cut_rows` returns them. */
static PyObject *cut_rows(const Beat *beat)
{
    if (is_empty(beat->keys))
        return Py_NewRef(beat->no_rows);
    const Tray *tray = (const Tray *)beat->tray;
    Py_ssize_t count = PyList_Size(beat->keys);
    if (count > tray->capacity || !has_same_rows(beat)) {
        PyErr_Clear();
        return PyObject_CallMethodObjArgs((PyObject *)beat, str_cut, NULL);
    }
    PyObject *plain = PyObject_GetAttr(beat->layout, str_is_plain);
    PyObject *cut = plain ? make_named(beat->cut_type, take_rows((size_t)count, &tray->target)) : NULL;
    PyObject *rows = cut ? PyTuple_Pack(3, beat->layout, cut, plain == Py_True ? Py_False : Py_True) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(cut);
    return rows;
}

/* -1 with an error set. */
static int hand_to_backlog(Beat *beat)
{
    Clock *clock = (Clock *)beat->clock;
    double wall = 0.0;
    PyObject *rows = cut_rows(beat);
    if (!rows && !(rows = do_without_rows(beat)))
        return -1;
    PyObject *phases = clock_split(beat->clock, NULL);
    for (int i = 0; phases && i < clock->phases; i++)
        wall += PyFloat_AsDouble(PyList_GetItem(phases, i));
    int done = phases && append_owned(beat->backlog, describe_step(beat, phases, rows));
    if (done)
        account((Ledger *)beat->schedule, read_long(beat->step), PyFloat_AsDouble(PyList_GetItem(phases, clock->own)), wall,
                beat->due == Py_True);
    Py_DECREF(rows);
    Py_XDECREF(phases);
    return done && begin_next(beat) ? 1 : -1;
}

/* End a step whose optimizer has stepped; -1 with an error set, 0 with nothing done: it is not a usual one. */
static int end_quietly(Beat *beat)
{
    if (!may_end_quietly(beat))
        return 0;
    if (beat->due != Py_True)
        return hand_to_backlog(beat);
    Latch *lock = ((Tray *)beat->tray)->lock;
    take_latch(lock, -1);
    int done = may_end_quietly(beat) ? hand_to_backlog(beat) : 0; /* another thread may have ended it meanwhile */
    give_latch(lock);
    return done;
}

/* ---------------------------------------------------------------- a root call */

static int is_grad_on(void)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(ask_grad, NULL);
    Py_XDECREF(answer);
    return answer == Py_True;
}

static int is_calm(const Beat *beat, PyObject *module)
{
    PyObject *id = PyLong_FromVoidPtr(module);
    int found = id ? PySet_Contains(beat->calm, id) : -1;
    Py_XDECREF(id);
    return found;
}

/* Whether the clock of a recorder is the compiled one: a test may have put another in its place. */
static int has_own_clock(const Beat *beat)
{
    return beat->clock && Py_TYPE(beat->clock) == clock_type;
}

/* Whether a root call is the first thing of its step: the last one is about to end, or did so with the next batch. */
static int is_first_call(const Beat *beat)
{
    if (beat->closing == Py_True)
        return 1;
    return is_empty(beat->calls) && !read_long(beat->losses) && read_long(beat->backward_at) != read_long(beat->serial);
}

/* Whether the call of a model has nothing to tell but its outputs; where these are not seen, not even they. */
static int is_usual_call(const Beat *beat, int is_seen)
{
    return beat->due == Py_False || (is_seen && beat->probing == Py_False);
}

/* The phase before; -1 where it is not a usual call, and -2 with an error set. `is_seen`: the caller sees its outputs,
   should the step be recorded. */
static int begin_call(Beat *beat, PyObject *module, PyObject *args, PyObject *kwargs, int phase, int is_seen)
{
    Clock *clock = (Clock *)beat->clock;
    if (!has_own_clock(beat) || !is_first_call(beat) || !is_empty(beat->on_root) || read_long(beat->in_backward))
        return -1;
    int calm = is_calm(beat, module), ended = 0, before = switch_phase(clock, clock->own);
    if (calm > 0 && read_flag(module, str_training) && is_grad_on() && !PyErr_Occurred())
        ended = beat->closing == Py_True ? end_quietly(beat) : 1;
    int usual = ended > 0 && is_usual_call(beat, is_seen);
    if (usual && !append_owned(beat->calls, make_named(beat->call_type, PyTuple_Pack(3, module, args, kwargs))))
        ended = -1;
    switch_phase(clock, usual ? phase : before);
    if (calm < 0 || ended < 0 || PyErr_Occurred())
        return -2;
    return usual ? before : -1;
}

/* begin_call(module, args, kwargs, phase). */
static PyObject *beat_begin_call(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!has_count(n, 4))
        return NULL;
    int before = begin_call((Beat *)self, args[0], args[1], args[2], (int)read_long(args[3]), 0);
    return before < -1 ? NULL : PyLong_FromLong(before);
}

/* ---------------------------------------------------------------- a backward pass */

/* Whether a tensor holds one number, and that a finite one. */
static int read_finite(PyObject *tensor, double *number)
{
    Task task;
    if (!read_tensor(tensor, 0, &task, NULL) || task.count != 1 || (task.type != F32 && task.type != F64))
        return 0;
    *number = read_element(&task, 0);
    return *number - *number == 0.0;
}

static int take_loss(Beat *beat, double number)
{
    PyObject *value = PyFloat_FromDouble(number);
    PyObject *scalar = value ? make_named(beat->scalar_type, PyTuple_Pack(3, str_loss, value, beat->losses)) : NULL;
    int done = append_owned(beat->scalars, scalar) && count_up(&beat->losses);
    if (done && number < PyFloat_AsDouble(PyTuple_GetItem(beat->lowest_loss, 0))) {
        PyObject *lowest = PyTuple_Pack(2, value, beat->step);
        done = lowest != NULL;
        if (lowest)
            set_field(&beat->lowest_loss, lowest);
    }
    if (value)
        set_field(&beat->last_loss, value);
    return done;
}

/* The phase before; -1 where it is not a quiet pass, with nothing done, and -2 with an error set. */
static int begin_pass(Beat *beat, PyObject *loss, int phase)
{
    Clock *clock = (Clock *)beat->clock;
    double number = 0.0;
    int is_wanted = loss != Py_None;
    if (!has_own_clock(beat) || beat->closing != Py_False || beat->probing != Py_False || !is_empty(beat->on_pass) ||
        !is_empty(beat->on_each_loss) || read_long(beat->in_backward) || (is_wanted && !read_finite(loss, &number)))
        return -1;
    int before = switch_phase(clock, clock->own);
    if ((is_wanted && !take_loss(beat, number)) || !count_up(&beat->in_backward))
        return -2;
    set_flag(&beat->has_output, 0);
    switch_phase(clock, phase);
    return before;
}

/* begin_pass(loss, phase). */
static PyObject *beat_begin_pass(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!has_count(n, 2))
        return NULL;
    int before = begin_pass((Beat *)self, args[0], (int)read_long(args[1]));
    return before < -1 ? NULL : PyLong_FromLong(before);
}

/* ---------------------------------------------------------------- the types */

static PyObject *beat_stay_quiet(PyObject *self, PyObject *seconds)
{
    double value = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred())
        return NULL;
    ((Beat *)self)->quiet_until = read_seconds() + value;
    Py_RETURN_NONE;
}

static PyObject *beat_end_quietly(PyObject *self, PyObject *unused)
{
    Beat *beat = (Beat *)self;
    Clock *clock = (Clock *)beat->clock;
    (void)unused;
    if (beat->closing != Py_True || !has_own_clock(beat))
        return PyBool_FromLong(0);
    int before = switch_phase(clock, clock->own), ended = end_quietly(beat);
    switch_phase(clock, before);
    return ended < 0 ? NULL : PyBool_FromLong(ended);
}

static PyMethodDef beat_methods[] = {
    {"end_quietly", beat_end_quietly, METH_NOARGS,
     "end_quietly() -> bool\n\nEnd a step whose optimizer has stepped, if it is a usual one; return whether it was."},
    {"stay_quiet", beat_stay_quiet, METH_O,
     "stay_quiet(seconds)\n\nLet steps end by the short way for so long: nothing is due but for them."},
    FAST("begin_call", beat_begin_call,
         "begin_call(module, args, kwargs, phase) -> int\n\n"
         "End a quiet step and begin the next one with a call of its model, in a phase; return the phase before. -1 leaves\n"
         "the call to the general way; the step before may have ended."),
    FAST("begin_pass", beat_begin_pass,
         "begin_pass(loss, phase) -> int\n\n"
         "Take the loss, unless it is None, of a step that no probe looks at and begin its backward pass, in a phase; return\n"
         "the phase before. -1, with nothing done, leaves it to the general way."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot beat_slots[] = {
    {Py_tp_doc, "Beat()\n\nWhat a quiet step touches of a recording."},
    {Py_tp_dealloc, free_beat},
    {Py_tp_traverse, traverse_beat},
    {Py_tp_clear, clear_beat},
    {Py_tp_methods, beat_methods},
    {Py_tp_members, beat_members},
    {0, NULL},
};

static PyType_Spec beat_spec = {
    "clew.stats._kernel.Beat", sizeof(Beat), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    beat_slots,
};

#endif
