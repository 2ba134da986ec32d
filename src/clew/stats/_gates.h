/* Gates stand where torch calls clew: at module calls, backward passes, optimizer steps, cleared gradients and losses. In a
   quiet step they let the call through to torch's own function without a Python frame of ours; whatever is not quiet goes
   on to the general way in Python, which asks everything again and does the same and more. Right among tensors that have
   filled the caches a Python function costs some microseconds, and such a step had two dozen of them.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

static PyTypeObject *holder_type, *turns_type, *course_type, *gated_call_type, *leaf_type;
static PyObject *str_is_compiling, *str_param_groups, *own_names;

/* ---------------------------------------------------------------- what gates ask */

/* The thread that trains; the base of `Owner`. */
typedef struct {
    PyObject_HEAD
    unsigned long thread;
    char is_shared;
} Holder;

static PyMemberDef holder_members[] = {
    {"thread", T_ULONG, offsetof(Holder, thread), 0, NULL},
    {"is_shared", T_BOOL, offsetof(Holder, is_shared), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot holder_slots[] = {
    {Py_tp_doc, "Holder()\n\nThe thread whose training is recorded, and whether another trains at the same time."},
    {Py_tp_members, holder_members},
    {0, NULL},
};

static PyType_Spec holder_spec = {
    "clew.stats._kernel.Holder", sizeof(Holder), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, holder_slots,
};

static int is_recorded_here(const Beat *beat)
{
    const Holder *holder = (const Holder *)beat->owner;
    return beat->asleep == Py_False && holder->thread == PyThread_get_thread_ident() && has_own_clock(beat);
}

/* Whether torch compiles or exports at the moment; `flags` are the variables of torch.compiler. */
static int is_compiling(PyObject *flags)
{
    return PyDict_GetItemWithError(flags, str_is_compiling) != Py_False;
}

static int has_answer(PyObject *question, PyObject *expected)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(question, NULL);
    Py_XDECREF(answer);
    return answer == expected;
}

/* Whether the optimizers and tensors are those with which a backward pass had nothing to tell; so they hold the model. */
static int has_known_optimizers(const Beat *beat, const Course *course, PyObject *optimizers)
{
    return PyDict_Size(optimizers) == beat->quiet_with && PyDict_Size(course->known) == course->looked_at;
}

/* Whether no mode of the user hears what tensors are asked; `count` returns how many dispatch modes are on. */
static int is_unheard(PyObject *count)
{
    PyObject *modes = has_answer(ask_mode, Py_False) ? PyObject_CallFunctionObjArgs(count, NULL) : NULL;
    int none = modes && PyObject_Not(modes) == 1;
    Py_XDECREF(modes);
    return none && !PyErr_Occurred();
}

/* Whether a recorder's own things are what gates take them for; checked once, when a gate is made. */
static int is_fit(PyObject *beat)
{
    Beat *parts = (Beat *)beat;
    int fit = PyObject_TypeCheck(beat, beat_type);
    for (const PyMemberDef *member = beat_members; fit && find_field(beat, member); member++)
        fit = *find_field(beat, member) != NULL;
    if (fit && PyObject_TypeCheck(parts->owner, holder_type) && Py_TYPE(parts->clock) == clock_type)
        return 1;
    PyErr_SetString(PyExc_TypeError, "a gate needs a whole recorder with a compiled clock and owner");
    return 0;
}

/* Give an exception to whoever answers for ours, and the place where it came, unless that is NULL; 0 with one set that
   is the user's. */
static int excuse_at(PyObject *answer_for, const char *place)
{
    if (!is_ours())
        return 0;
    PyObject *error = take_error(), *done = NULL;
    if (error)
        done = PyObject_CallFunction(answer_for, place ? "Os" : "(O)", error, place);
    Py_XDECREF(error);
    Py_XDECREF(done);
    if (PyErr_Occurred() && is_ours())
        PyErr_Clear();
    return !PyErr_Occurred();
}

static int excuse(PyObject *answer_for)
{
    return excuse_at(answer_for, NULL);
}

/* What somebody asks of a gate is answered by the Python function that it stands for, unless it is about the gate. */
static PyObject *ask_general(PyObject *self, PyObject *name, PyObject *general)
{
    int is_own = PySet_Contains(own_names, name);
    if (is_own < 0)
        return NULL;
    return is_own || !general ? PyObject_GenericGetAttr(self, name) : PyObject_GetAttr(general, name);
}

/* ---------------------------------------------------------------- the shape of all gates */

typedef struct {
    PyObject_HEAD
    PyObject *original, *general, *beat, *course, *entries, *flags, *ask, *fail, *finish, *lists, *leaf, *measure;
    int phase;
} Gate;

enum { GATE_FIELDS = 12 };

#define GATE_FIELD(name) {#name, T_OBJECT_EX, offsetof(Gate, name), READONLY, NULL}

static PyMemberDef gate_members[] = {
    GATE_FIELD(original), GATE_FIELD(general), GATE_FIELD(beat), GATE_FIELD(course), GATE_FIELD(entries), GATE_FIELD(flags),
    GATE_FIELD(ask),      GATE_FIELD(fail),    GATE_FIELD(finish), GATE_FIELD(lists), GATE_FIELD(leaf),
    GATE_FIELD(measure),  {NULL, 0, 0, 0, NULL},
};

static int traverse_gate(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, gate_members, visit, arg);
}

static int clear_gate(PyObject *self)
{
    return clear_fields(self, gate_members);
}

static void free_gate(PyObject *self)
{
    release_object(self, clear_gate);
}

enum {
    ORIGINAL = 1, GENERAL = 1 << 1, BEAT = 1 << 2, FLIGHT = 1 << 3, ENTRIES = 1 << 4, FLAGS = 1 << 5,
    ASK = 1 << 6, FAIL = 1 << 7, FINISH = 1 << 8, LISTS = 1 << 9, LEAF = 1 << 10, MEASURE = 1 << 11,
};

/* Make a gate of keyword arguments: the fields that it needs, and a phase. */
static PyObject *make_gate(PyTypeObject *type, PyObject *args, PyObject *kwargs, int needed)
{
    static char *names[] = {"original", "general", "beat", "course", "entries", "flags",
                            "ask",      "fail",    "finish", "lists", "leaf",   "measure", "phase", NULL};
    PyObject *given[GATE_FIELDS] = {NULL};
    int phase = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOOOOOOOOOOi", names, &given[0], &given[1], &given[2], &given[3],
                                     &given[4], &given[5], &given[6], &given[7], &given[8], &given[9], &given[10],
                                     &given[11], &phase))
        return NULL;
    for (int i = 0; i < GATE_FIELDS; i++)
        if (needed >> i & 1 && !given[i])
            return PyErr_Format(PyExc_TypeError, "a gate needs '%s'", names[i]);
    if ((given[2] && !is_fit(given[2])) || (given[3] && !PyObject_TypeCheck(given[3], course_type)) ||
        (given[10] && given[10] != Py_None && !PyObject_TypeCheck(given[10], leaf_type))) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a gate needs what is compiled");
        return NULL;
    }
    Gate *gate = allocate(type);
    for (int i = 0; gate && i < GATE_FIELDS; i++)
        if (given[i])
            *find_field((PyObject *)gate, &gate_members[i]) = Py_NewRef(given[i]);
    if (gate)
        gate->phase = phase;
    return (PyObject *)gate;
}

static PyObject *ask_gate(PyObject *self, PyObject *name)
{
    return ask_general(self, name, ((Gate *)self)->general);
}

/* A function as the method of an object. */
static PyObject *bind(PyObject *function, PyObject *object, PyObject *type)
{
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(function), Py_tp_descr_get);
    return get ? get(function, object, type) : Py_NewRef(function);
}

static PyObject *call_general(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return PyObject_Call(((Gate *)self)->general, args, kwargs);
}

static PyObject *copy_gate(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

/* Pickled by name, as a function is. */
static PyObject *reduce_gate(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyObject_GetAttrString(((Gate *)self)->general, "__qualname__");
}

static PyMethodDef function_methods[] = {
    {"__copy__", copy_gate, METH_NOARGS, "A function is its own copy."},
    {"__deepcopy__", copy_gate, METH_O, "A function is its own copy."},
    {"__reduce__", reduce_gate, METH_NOARGS, "The name that it is found by."},
    {NULL, NULL, 0, NULL},
};

#define MAKES(name, needed)                                                                                           \
    static PyObject *name(PyTypeObject *type, PyObject *args, PyObject *kwargs)                                       \
    {                                                                                                                 \
        return make_gate(type, args, kwargs, needed);                                                                 \
    }

#define GATE_SLOTS(make)                                                                                              \
    {Py_tp_new, make}, {Py_tp_dealloc, free_gate}, {Py_tp_traverse, traverse_gate}, {Py_tp_clear, clear_gate}

/* ---------------------------------------------------------------- module calls */

/* A root call that may turn out to be quiet: a gate and the model that is called. */
typedef struct {
    PyObject_HEAD
    PyObject *gate, *module;
} GatedCall;

static PyMemberDef gated_call_members[] = {
    {"gate", T_OBJECT_EX, offsetof(GatedCall, gate), READONLY, NULL},
    {"module", T_OBJECT_EX, offsetof(GatedCall, module), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int traverse_gated_call(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, gated_call_members, visit, arg);
}

static int clear_gated_call(PyObject *self)
{
    return clear_fields(self, gated_call_members);
}

static void free_gated_call(PyObject *self)
{
    release_object(self, clear_gated_call);
}

static PyObject *bind_gated(PyObject *gate, PyObject *module)
{
    GatedCall *call = allocate(gated_call_type);
    if (call) {
        call->gate = Py_NewRef(gate);
        call->module = Py_NewRef(module);
    }
    return (PyObject *)call;
}

/* Whether the outputs of a root call are seen here, should it be recorded. */
static int may_see_root(const Gate *gate)
{
    return gate->leaf != Py_None && !((const Beat *)gate->beat)->wants_batch;
}

/* Whether this thread is in a root call whose outputs are seen here. */
static int is_inside_seen(const Gate *gate)
{
    const Beat *beat = (const Beat *)gate->beat;
    unsigned long me = PyThread_get_thread_ident();
    return gate->leaf != Py_None && (beat->rooted == me || beat->seeing == me);
}

/* Chosen where torch looks the method up: inside a quiet call, what it gets is its own method and nothing of ours. */
static PyObject *bind_call(PyObject *self, PyObject *module, PyObject *type)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    if (!module || module == Py_None)
        return Py_NewRef(gate->general);
    if (beat->asleep != Py_False || beat->inside == PyThread_get_thread_ident())
        return bind(gate->original, module, type);
    if (is_inside_seen(gate))
        return bind_gated(self, module);
    if ((beat->due == Py_False || may_see_root(gate)) && !beat->nested && is_first_call(beat) && is_recorded_here(beat))
        return bind_gated(self, module);
    return bind(gate->general, module, type);
}

/* Begin a usual call; -1 where it is not one, and -2 with an exception that is the user's. */
static int enter_call(Gate *gate, PyObject *module, PyObject *args, PyObject *kwargs)
{
    Beat *beat = (Beat *)gate->beat;
    if (!is_recorded_here(beat) || beat->inside || beat->nested || is_compiling(gate->flags) ||
        !has_answer(gate->ask, Py_None) || !has_answer(ask_mode, Py_False))
        return PyErr_Occurred() && !excuse(gate->fail) ? -2 : -1;
    PyObject *given = kwargs ? Py_NewRef(kwargs) : PyDict_New();
    int before = given ? begin_call(beat, module, args, given, gate->phase, may_see_root(gate)) : -1;
    Py_XDECREF(given);
    if (PyErr_Occurred())
        return excuse(gate->fail) ? -1 : -2;
    return before;
}

/* Have the output of a module put down; `finish` does what is left, or answers for an exception. */
static int see_output(Gate *gate, PyObject *module, PyObject *args, PyObject *kwargs, PyObject *output)
{
    const Beat *beat = (const Beat *)gate->beat;
    int seen = 0, tag = beat->rooted == PyThread_get_thread_ident() ? 0 : beat->tag;
    if (has_answer(ask_mode, Py_False))
        seen = observe((Leaf *)gate->leaf, gate->entries, module, output, tag);
    if (seen > 0)
        return 1;
    if (PyErr_Occurred() && !is_ours())
        return 0;
    PyObject *error = take_error(), *done = NULL, *given = kwargs ? Py_NewRef(kwargs) : PyDict_New();
    if (given)
        done = PyObject_CallFunctionObjArgs(gate->finish, module, args, given, output, error ? error : Py_None, NULL);
    Py_XDECREF(given);
    Py_XDECREF(error);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *call_bound(PyObject *function, PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *method = bind(function, module, (PyObject *)Py_TYPE(module));
    PyObject *output = method ? PyObject_Call(method, args, kwargs) : NULL;
    Py_XDECREF(method);
    return output;
}

/* A call whose output is seen: a root call that is recorded, or one inside. */
static PyObject *call_seen(Gate *gate, PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *output = call_bound(gate->original, module, args, kwargs);
    if (output && !see_output(gate, module, args, kwargs, output))
        Py_CLEAR(output);
    return output;
}

/* A root call that goes straight to torch's own method; what is called inside is seen if the step is recorded. */
static PyObject *call_usual_root(Gate *gate, PyObject *module, PyObject *args, PyObject *kwargs, int before)
{
    Beat *beat = (Beat *)gate->beat;
    int is_seen = beat->due == Py_True;
    unsigned long *state = is_seen ? &beat->rooted : &beat->inside;
    beat->nested += is_seen;
    *state = PyThread_get_thread_ident();
    PyObject *output = is_seen ? call_seen(gate, module, args, kwargs) : call_bound(gate->original, module, args, kwargs);
    *state = 0;
    beat->nested -= is_seen;
    if (is_seen)
        forget_seen((Leaf *)gate->leaf);
    if (output)
        set_flag(&beat->has_output, 1);
    switch_phase((Clock *)beat->clock, before);
    return output;
}

static PyObject *call_gated(PyObject *self, PyObject *args, PyObject *kwargs)
{
    GatedCall *call = (GatedCall *)self;
    Gate *gate = (Gate *)call->gate;
    if (is_inside_seen(gate))
        return call_seen(gate, call->module, args, kwargs);
    int before = enter_call(gate, call->module, args, kwargs);
    if (before < -1)
        return NULL;
    if (before < 0)
        return call_bound(gate->general, call->module, args, kwargs);
    return call_usual_root(gate, call->module, args, kwargs, before);
}

static PyObject *ask_gated(PyObject *self, PyObject *name)
{
    GatedCall *call = (GatedCall *)self;
    PyObject *method = bind(((Gate *)call->gate)->general, call->module, (PyObject *)Py_TYPE(call->module));
    PyObject *answer = ask_general(self, name, method);
    Py_XDECREF(method);
    return answer;
}

static PyType_Slot gated_call_slots[] = {
    {Py_tp_doc, "A call of a model, as its gate gives it to torch."},
    {Py_tp_dealloc, free_gated_call},
    {Py_tp_traverse, traverse_gated_call},
    {Py_tp_clear, clear_gated_call},
    {Py_tp_call, call_gated},
    {Py_tp_getattro, ask_gated},
    {0, NULL},
};

static PyType_Spec gated_call_spec = {
    "clew.stats._kernel.GatedCall", sizeof(GatedCall), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, gated_call_slots,
};

MAKES(make_call_gate, ORIGINAL | GENERAL | BEAT | ENTRIES | FLAGS | ASK | FAIL | FINISH | LEAF)

static PyType_Slot call_gate_slots[] = {
    {Py_tp_doc, "CallGate(*, original, general, beat, flags, ask, fail, leaf, entries, finish, phase)\n\n"
                "The method that calls modules: torch's own inside a quiet call, the general one where a call is not quiet.\n"
                "``ask`` returns None unless torch.jit traces; ``fail`` answers for an exception. ``leaf``, unless it is None,\n"
                "sees the outputs of the modules in ``entries`` inside a call that is recorded, and ``finish`` those that it\n"
                "leaves, or answers for its exception."},
    GATE_SLOTS(make_call_gate),
    {Py_tp_descr_get, bind_call},
    {Py_tp_call, call_general},
    {0, NULL},
};

static PyType_Spec call_gate_spec = {
    "clew.stats._kernel.CallGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, call_gate_slots,
};
#endif
