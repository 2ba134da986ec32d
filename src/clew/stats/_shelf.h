/* Where the batches of a loader are kept until a snapshot needs them: what the present step was given, the entries of the
   steps before, and the iterators that batches come from. Keeping a plain batch and closing a usual entry passes here
   without a Python frame; whatever else may be is left, untouched, to the general way in Python, which does the same and
   more.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

enum { MOST_EVENTS = 16, RANDOM_BYTES = 10000 }; /* as in capture/torch/snapshot.py */
enum { GIVEN_VALUE = 1, GIVEN_VERSIONS = 4, GIVEN_BYTES = 5, ENTRY_BYTES = 3 };

static PyTypeObject *source_type, *shelf_type;
static PyObject *str_append, *str_popleft, *str_batch, *str_nothing, *str_gauss, *str_gauss_next, *str_instance;

/* ---------------------------------------------------------------- an iterator of a loader */

/* The base of `_Source`. */
typedef struct {
    PyObject_HEAD
    PyObject *ref, *name, *pending;
    long position;
} Source;

static PyMemberDef source_members[] = {
    {"ref", T_OBJECT_EX, offsetof(Source, ref), 0, NULL},
    {"name", T_OBJECT_EX, offsetof(Source, name), 0, NULL},
    {"pending", T_OBJECT_EX, offsetof(Source, pending), 0, NULL},
    {"position", T_LONG, offsetof(Source, position), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int traverse_source(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, source_members, visit, arg);
}

static int clear_source(PyObject *self)
{
    return clear_fields(self, source_members);
}

static void free_source(PyObject *self)
{
    release_object(self, clear_source);
}

static PyType_Slot source_slots[] = {
    {Py_tp_doc, "Source()\n\nAn iterator of a loader: how many batches it has given, and the indices of those to come."},
    {Py_tp_dealloc, free_source},
    {Py_tp_traverse, traverse_source},
    {Py_tp_clear, clear_source},
    {Py_tp_members, source_members},
    {0, NULL},
};

static PyType_Spec source_spec = {
    "clew.stats._kernel.Source", sizeof(Source), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    source_slots,
};

/* ---------------------------------------------------------------- what is kept for snapshots */

/* The base of `SnapshotLens`. */
typedef struct {
    PyObject_HEAD
    PyObject *given, *entries, *ahead, *off, *blocks, *spare, *given_type, *entry_type, *memory_type;
    char is_whole, clones, is_ending, is_dear;
    long long keep_batches, pending_bytes, flush_bytes, ring_bytes, trouble_at;
    double quiet_until;
} Shelf;

#define SHELF(name, type) {#name, type, offsetof(Shelf, name), 0, NULL}

static PyMemberDef shelf_members[] = {
    SHELF(given, T_OBJECT_EX),       SHELF(entries, T_OBJECT_EX),     SHELF(ahead, T_OBJECT_EX),
    SHELF(off, T_OBJECT_EX),         SHELF(blocks, T_OBJECT_EX),      SHELF(spare, T_OBJECT_EX),
    SHELF(given_type, T_OBJECT_EX),  SHELF(entry_type, T_OBJECT_EX),  SHELF(memory_type, T_OBJECT_EX),
    SHELF(is_whole, T_BOOL),         SHELF(clones, T_BOOL),           SHELF(is_ending, T_BOOL),
    SHELF(is_dear, T_BOOL),          SHELF(keep_batches, T_LONGLONG), SHELF(pending_bytes, T_LONGLONG),
    SHELF(flush_bytes, T_LONGLONG),  SHELF(ring_bytes, T_LONGLONG),   SHELF(trouble_at, T_LONGLONG),
    {NULL, 0, 0, 0, NULL},
};

static int traverse_shelf(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, shelf_members, visit, arg);
}

static int clear_shelf(PyObject *self)
{
    return clear_fields(self, shelf_members);
}

static void free_shelf(PyObject *self)
{
    release_object(self, clear_shelf);
}

static PyObject *shelf_stay_quiet(PyObject *self, PyObject *seconds)
{
    double value = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred())
        return NULL;
    ((Shelf *)self)->quiet_until = read_seconds() + value;
    Py_RETURN_NONE;
}

/* Whether batches are kept at all. */
static int keeps_batches(const Shelf *shelf)
{
    return shelf->keep_batches > 0 && shelf->off && PyObject_Not(shelf->off) == 1;
}

static int push(PyObject *queue, PyObject *thing)
{
    PyObject *done = PyObject_CallMethodObjArgs(queue, str_append, thing, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

static long long read_bytes(PyObject *record, Py_ssize_t field)
{
    PyObject *number = record ? PyTuple_GetItem(record, field) : NULL;
    return number ? PyLong_AsLongLong(number) : -1;
}

/* ---------------------------------------------------------------- the random states around a batch */

/* The spare normal number of Python's generator; `spare` is who knows that generator. */
static PyObject *read_spare(PyObject *spare)
{
    PyObject *instance = PyObject_GetAttr(spare, str_instance);
    PyObject *gauss = instance ? PyObject_GetAttr(instance, str_gauss_next) : NULL;
    Py_XDECREF(instance);
    return gauss;
}

/* Copy the states of all generators, where they lie in memory. */
static int take_random(PyObject *blocks, PyObject *spare)
{
    PyObject *gauss = copy_blocks(blocks) ? read_spare(spare) : NULL;
    int done = gauss && PyObject_SetAttr(spare, str_gauss, gauss) == 0;
    Py_XDECREF(gauss);
    return done;
}

/* None where nothing was drawn since the states were copied, else the memory they lie in. */
static PyObject *keep_random(const Shelf *shelf)
{
    uint64_t block[3][3];
    char *packed;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(shelf->blocks, &packed, &size) < 0 || size != (Py_ssize_t)sizeof block)
        return NULL;
    memcpy(block, packed, sizeof block);
    PyObject *gauss = read_spare(shelf->spare), *before = gauss ? PyObject_GetAttr(shelf->spare, str_gauss) : NULL;
    int same = before ? PyObject_RichCompareBool(gauss, before, Py_EQ) : -1;
    for (int i = 0; same == 1 && i < 3; i++)
        same = !has_moved((char *)(uintptr_t)block[i][0], (char *)(uintptr_t)block[i][1], (size_t)block[i][2]);
    PyObject *kept = same == 1 ? Py_NewRef(Py_None) : NULL;
    if (same == 0) {
        PyObject *state[3];
        for (int i = 0; i < 3; i++)
            state[i] = PyBytes_FromStringAndSize((char *)(uintptr_t)block[i][1], (Py_ssize_t)block[i][2]);
        if (state[0] && state[1] && state[2])
            kept = make_named(shelf->memory_type, PyTuple_Pack(4, state[0], state[1], gauss, state[2]));
        for (int i = 0; i < 3; i++)
            Py_XDECREF(state[i]);
    }
    Py_XDECREF(gauss);
    Py_XDECREF(before);
    return kept;
}

/* ---------------------------------------------------------------- a batch */

/* Whether the batches of a loader can be kept here. */
static int is_usual_shelf(const Shelf *shelf)
{
    return !shelf->clones && shelf->blocks && PyBytes_Check(shelf->blocks) && PyList_Size(shelf->given) < MOST_EVENTS;
}

/* What is to be kept of a batch; NULL where that is not plain, perhaps with an error set. */
static PyObject *describe_given(const Shelf *shelf, PyObject *batch, const Weight *weight)
{
    PyObject *random = keep_random(shelf), *given = NULL;
    PyObject *size = random ? PyLong_FromLongLong(weight->bytes + (random != Py_None ? RANDOM_BYTES : 0)) : NULL;
    if (size)
        given = make_named(shelf->given_type,
                           PyTuple_Pack(6, str_batch, batch, str_nothing, random, weight->versions, size));
    Py_XDECREF(random);
    Py_XDECREF(size);
    return given;
}

static int hold(Shelf *shelf, PyObject *given)
{
    return PyList_Append(shelf->given, given) == 0 && push(shelf->ahead, given);
}

/* ---------------------------------------------------------------- the end of a step */

/* Whether what was given is surely as it was: 0 where the training has written into it, or it is not plain. */
static int is_unchanged(PyObject *given)
{
    Weight weight = {.known = PyTuple_GetItem(given, GIVEN_VERSIONS)};
    int same = weigh_part(PyTuple_GetItem(given, GIVEN_VALUE), &weight, 0) && weight.seen == PyList_Size(weight.known);
    PyErr_Clear();
    return same;
}

/* The bytes of what the step was given; -1 where somebody has to look at it. */
static long long weigh_given(const Shelf *shelf)
{
    long long size = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(shelf->given); i++) {
        PyObject *given = PyList_GetItem(shelf->given, i);
        if (!shelf->clones && !is_unchanged(given))
            return -1;
        size += read_bytes(given, GIVEN_BYTES);
    }
    return size;
}

/* Let the oldest entries go that there is no room for. */
static int trim(Shelf *shelf)
{
    while (PyObject_Size(shelf->entries) > 0 &&
           (shelf->pending_bytes > shelf->ring_bytes || PyObject_Size(shelf->entries) > shelf->keep_batches)) {
        PyObject *oldest = PyObject_CallMethodObjArgs(shelf->entries, str_popleft, NULL);
        if (!oldest)
            return 0;
        shelf->pending_bytes -= read_bytes(oldest, ENTRY_BYTES);
        Py_DECREF(oldest);
    }
    return !PyErr_Occurred();
}

/* Close the entry of a step; 0 with nothing done where it is not a usual one, -1 with an error set. */
static int close_entry(Shelf *shelf, PyObject *step)
{
    if (!keeps_batches(shelf))
        return PyErr_Occurred() ? -1 : shelf->off && PyObject_Not(shelf->off) == 1;
    long long size = weigh_given(shelf);
    if (size < 0 || shelf->trouble_at >= 0 || read_seconds() >= shelf->quiet_until ||
        (shelf->pending_bytes + size > shelf->flush_bytes && !shelf->is_dear))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *next = PyList_New(0), *bytes = PyLong_FromLongLong(size);
    PyObject *is_whole = shelf->is_whole ? Py_True : Py_False, *entry = NULL;
    if (next && bytes)
        entry = make_named(shelf->entry_type, PyTuple_Pack(4, step, shelf->given, is_whole, bytes));
    int done = entry && push(shelf->entries, entry);
    if (done) {
        shelf->pending_bytes += size;
        shelf->is_whole = 1;
        set_field(&shelf->given, Py_NewRef(next));
        done = trim(shelf);
    }
    Py_XDECREF(next);
    Py_XDECREF(bytes);
    Py_XDECREF(entry);
    return done ? 1 : -1;
}

/* ---------------------------------------------------------------- the types */

static PyMethodDef shelf_methods[] = {
    {"stay_quiet", shelf_stay_quiet, METH_O,
     "stay_quiet(seconds)\n\nLet entries be closed by the short way for so long: none is to be written but for its bytes."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot shelf_slots[] = {
    {Py_tp_doc, "Shelf()\n\nWhat batches and the end of a usual step touch of the snapshots."},
    {Py_tp_dealloc, free_shelf},
    {Py_tp_traverse, traverse_shelf},
    {Py_tp_clear, clear_shelf},
    {Py_tp_methods, shelf_methods},
    {Py_tp_members, shelf_members},
    {0, NULL},
};

static PyType_Spec shelf_spec = {
    "clew.stats._kernel.Shelf", sizeof(Shelf), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, shelf_slots,
};

static int intern_shelf_names(void)
{
    return (str_append = PyUnicode_InternFromString("append")) && (str_popleft = PyUnicode_InternFromString("popleft")) &&
           (str_batch = PyUnicode_InternFromString("batch")) && (str_nothing = PyUnicode_InternFromString("")) &&
           (str_gauss = PyUnicode_InternFromString("gauss")) &&
           (str_gauss_next = PyUnicode_InternFromString("gauss_next")) &&
           (str_instance = PyUnicode_InternFromString("instance"));
}
#endif
