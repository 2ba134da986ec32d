/* The state of a recorder that gates, hooks and the ends of steps touch, and how they touch it.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

static PyTypeObject *beat_type, *clock_type;

static void *allocate(PyTypeObject *type)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

static void release_object(PyObject *self, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    clear(self);
    release(self);
    Py_DECREF(type);
}

typedef struct {
    PyObject_HEAD
    PyObject *step, *serial, *ended, *losses, *in_backward;
    PyObject *backward_at, *closing, *due, *probing, *prompt, *is_followed, *has_output;
    PyObject *keys, *scalars, *batches, *waiting, *calls, *backlog, *no_rows;
    PyObject *last_loss, *lowest_loss;
    PyObject *calm, *on_root, *on_pass, *on_each_loss, *on_end, *on_seldom, *on_stepping, *on_stepped;
    PyObject *schedule, *clock, *call_type, *scalar_type, *asleep, *owner, *signing, *turns, *on_batch;
    PyObject *copies, *handles, *counts, *latest_rows, *tray, *registry, *layout, *rows, *cut_type;
    double quiet_until;
    long longest_backlog, most_recorded, nested, quiet_with, updating, alone_at;
    /* The thread that is in a quiet root call, in a recorded one that the gate has let through, or in one that goes by the
       general way and is recorded; or 0. */
    unsigned long inside, rooted, seeing;
    int resumes, tag; /* the phase that goes on after the step of an optimizer; what marks recorded calls */
    char wants_loss, wants_batch, wants_param, wants_grad, wants_update, wants_after, fetching;
} Beat;

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Beat, name), 0, NULL}

static PyMemberDef beat_members[] = {
    FIELD(step),          FIELD(serial),      FIELD(ended),       FIELD(losses),
    FIELD(in_backward),   FIELD(closing),     FIELD(due),         FIELD(probing),
    FIELD(prompt),        FIELD(has_output),  FIELD(keys),        FIELD(scalars),
    FIELD(batches),       FIELD(waiting),     FIELD(calls),       FIELD(backlog),
    FIELD(no_rows),       FIELD(last_loss),   FIELD(lowest_loss), FIELD(calm),
    FIELD(on_root),       FIELD(on_pass),     FIELD(on_each_loss), FIELD(on_end),
    FIELD(on_seldom),     FIELD(schedule),    FIELD(clock),       FIELD(call_type),
    FIELD(scalar_type),   FIELD(backward_at), FIELD(is_followed), FIELD(on_stepping),
    FIELD(on_stepped),    FIELD(asleep),      FIELD(owner),       FIELD(signing),
    FIELD(turns),         FIELD(on_batch),    FIELD(copies),      FIELD(handles),
    FIELD(counts),        FIELD(latest_rows), FIELD(tray),        FIELD(registry),
    FIELD(layout),        FIELD(rows),        FIELD(cut_type),
    {"longest_backlog", T_LONG, offsetof(Beat, longest_backlog), 0, NULL},
    {"most_recorded", T_LONG, offsetof(Beat, most_recorded), 0, NULL},
    {"alone_at", T_LONG, offsetof(Beat, alone_at), 0, NULL},
    {"nested", T_LONG, offsetof(Beat, nested), 0, NULL},
    {"quiet_with", T_LONG, offsetof(Beat, quiet_with), 0, NULL},
    {"updating", T_LONG, offsetof(Beat, updating), 0, NULL},
    {"inside", T_ULONG, offsetof(Beat, inside), READONLY, NULL},
    {"rooted", T_ULONG, offsetof(Beat, rooted), READONLY, NULL},
    {"seeing", T_ULONG, offsetof(Beat, seeing), 0, NULL},
    {"resumes", T_INT, offsetof(Beat, resumes), 0, NULL},
    {"tag", T_INT, offsetof(Beat, tag), 0, NULL},
    {"wants_loss", T_BOOL, offsetof(Beat, wants_loss), 0, NULL},
    {"wants_batch", T_BOOL, offsetof(Beat, wants_batch), 0, NULL},
    {"wants_param", T_BOOL, offsetof(Beat, wants_param), 0, NULL},
    {"wants_grad", T_BOOL, offsetof(Beat, wants_grad), 0, NULL},
    {"wants_update", T_BOOL, offsetof(Beat, wants_update), 0, NULL},
    {"wants_after", T_BOOL, offsetof(Beat, wants_after), 0, NULL},
    {"fetching", T_BOOL, offsetof(Beat, fetching), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* The object that a member of a type with such a table stands for, or NULL at the end of its objects, which come first. */
static PyObject **find_field(PyObject *self, const PyMemberDef *member)
{
    return member->name && member->type == T_OBJECT_EX ? (PyObject **)((char *)self + member->offset) : NULL;
}

static int visit_fields(PyObject *self, const PyMemberDef *member, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (; find_field(self, member); member++)
        Py_VISIT(*find_field(self, member));
    return 0;
}

static int clear_fields(PyObject *self, const PyMemberDef *member)
{
    for (; find_field(self, member); member++)
        Py_CLEAR(*find_field(self, member));
    return 0;
}

static int traverse_beat(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, beat_members, visit, arg);
}

static int clear_beat(PyObject *self)
{
    return clear_fields(self, beat_members);
}

static void free_beat(PyObject *self)
{
    release_object(self, clear_beat);
}

static void set_field(PyObject **field, PyObject *value)
{
    PyObject *before = *field;
    *field = value;
    Py_XDECREF(before);
}

static void set_flag(PyObject **field, int value)
{
    set_field(field, Py_NewRef(value ? Py_True : Py_False));
}

static long read_long(PyObject *number)
{
    return number ? PyLong_AsLong(number) : -1;
}

static int count_up(PyObject **field)
{
    PyObject *more = PyLong_FromLong(read_long(*field) + 1);
    if (more)
        set_field(field, more);
    return more != NULL;
}

static int is_empty(PyObject *list)
{
    return list && PyList_Size(list) == 0;
}

/* A named tuple without a Python frame. */
static PyObject *make_named(PyObject *type, PyObject *parts)
{
    PyObject *given = parts ? PyTuple_Pack(1, parts) : NULL;
    newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    PyObject *named = given ? make((PyTypeObject *)type, given, NULL) : NULL;
    Py_XDECREF(given);
    Py_XDECREF(parts);
    return named;
}

static int append_owned(PyObject *list, PyObject *thing)
{
    int done = thing && PyList_Append(list, thing) == 0;
    Py_XDECREF(thing);
    return done;
}

/* Whether the exception that is set is ours to answer for; a KeyboardInterrupt or a SystemExit is the user's. */
static int is_ours(void)
{
    return PyErr_ExceptionMatches(PyExc_Exception);
}

/* The exception that is set, which is set no more; with its traceback. */
static PyObject *take_error(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error && trace)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}
#endif
