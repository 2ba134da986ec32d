/* Gates stand where torch calls clew: at module calls, backward passes, optimizer steps, cleared gradients and losses. In a
   quiet step they let the call through to torch's own function without a Python frame of ours; whatever is not quiet goes
   on to the general way in Python, which asks everything again and does the same and more. Right among tensors that have
   filled the caches a Python function costs some microseconds, and such a step had two dozen of them.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

static PyTypeObject *holder_type, *turns_type, *course_type, *gated_call_type;
static PyObject *str_is_compiling, *str_param_groups, *str_class;

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
    return beat->asleep == Py_False && holder->thread == PyThread_get_thread_ident();
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

/* Whether a recorder's own things are what gates take them for; checked once, when a gate is made. */
static int is_fit(PyObject *beat)
{
    Beat *parts = (Beat *)beat;
    if (PyObject_TypeCheck(beat, beat_type) && parts->owner && PyObject_TypeCheck(parts->owner, holder_type) &&
        parts->clock && Py_TYPE(parts->clock) == clock_type)
        return 1;
    PyErr_SetString(PyExc_TypeError, "a gate needs a recorder with a compiled clock and owner");
    return 0;
}

/* Give an exception of ours to whoever answers for it. */
static void excuse(PyObject *answer_for)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done = error ? PyObject_CallFunctionObjArgs(answer_for, error, NULL) : NULL;
    PyErr_Clear();
    Py_XDECREF(done);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* What somebody asks of a gate is answered by the Python function that it stands for. */
static PyObject *ask_general(PyObject *self, PyObject *name, PyObject *general)
{
    int is_own = PyObject_RichCompareBool(name, str_class, Py_EQ);
    return is_own || !general ? PyObject_GenericGetAttr(self, name) : PyObject_GetAttr(general, name);
}

/* ---------------------------------------------------------------- the shape of all gates */

typedef struct {
    PyObject_HEAD
    PyObject *original, *general, *beat, *course, *entries, *flags, *ask, *fail, *finish, *lists;
    int phase;
} Gate;

#define GATE_FIELD(name) {#name, T_OBJECT_EX, offsetof(Gate, name), READONLY, NULL}

static PyMemberDef gate_members[] = {
    GATE_FIELD(original), GATE_FIELD(general), GATE_FIELD(beat), GATE_FIELD(course), GATE_FIELD(entries), GATE_FIELD(flags),
    GATE_FIELD(ask),      GATE_FIELD(fail),    GATE_FIELD(finish), GATE_FIELD(lists), {NULL, 0, 0, 0, NULL},
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

/* Make a gate of keyword arguments: any of the fields, and a phase. */
static PyObject *make_gate(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"original", "general", "beat", "course", "entries", "flags",
                            "ask",      "fail",    "finish", "lists", "phase", NULL};
    PyObject *given[10] = {NULL};
    int phase = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOOOOOOOOi", names, &given[0], &given[1], &given[2], &given[3], &given[4],
                                     &given[5], &given[6], &given[7], &given[8], &given[9], &phase))
        return NULL;
    if ((given[2] && !is_fit(given[2])) || (given[3] && !PyObject_TypeCheck(given[3], course_type))) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a gate needs a flight recorder with a compiled base");
        return NULL;
    }
    Gate *gate = allocate(type);
    for (int i = 0; gate && i < 10; i++)
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

#define GATE_SLOTS                                                                                                   \
    {Py_tp_new, make_gate}, {Py_tp_dealloc, free_gate}, {Py_tp_traverse, traverse_gate}, {Py_tp_clear, clear_gate}

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

/* Chosen where torch looks the method up: inside a quiet call, what it gets is its own method and nothing of ours. */
static PyObject *bind_call(PyObject *self, PyObject *module, PyObject *type)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    if (!module || module == Py_None)
        return Py_NewRef(gate->general);
    if (beat->asleep != Py_False || (beat->inside && beat->inside == PyThread_get_thread_ident()))
        return bind(gate->original, module, type);
    if (beat->closing == Py_True && beat->due == Py_False && !beat->nested && is_recorded_here(beat))
        return bind_gated(self, module);
    return bind(gate->general, module, type);
}

/* Begin a quiet call; -1 where it is not one. */
static int enter_call(Gate *gate, PyObject *module, PyObject *args, PyObject *kwargs)
{
    Beat *beat = (Beat *)gate->beat;
    if (!is_recorded_here(beat) || beat->inside || beat->nested || is_compiling(gate->flags) ||
        !has_answer(gate->ask, Py_None) || !has_answer(ask_mode, Py_False) || PyErr_Occurred()) {
        PyErr_Clear();
        return -1;
    }
    PyObject *given = kwargs ? Py_NewRef(kwargs) : PyDict_New();
    int before = given ? begin_call(beat, module, args, given, gate->phase) : -1;
    Py_XDECREF(given);
    if (PyErr_Occurred()) {
        excuse(gate->fail);
        return -1;
    }
    return before;
}

static void leave_call(Beat *beat, int before, int is_whole)
{
    beat->inside = 0;
    if (is_whole)
        set_flag(&beat->has_output, 1);
    switch_phase((Clock *)beat->clock, before);
}

static PyObject *call_gated(PyObject *self, PyObject *args, PyObject *kwargs)
{
    GatedCall *call = (GatedCall *)self;
    Gate *gate = (Gate *)call->gate;
    Beat *beat = (Beat *)gate->beat;
    int before = enter_call(gate, call->module, args, kwargs);
    PyObject *method = bind(before < 0 ? gate->general : gate->original, call->module, (PyObject *)Py_TYPE(call->module));
    if (before >= 0)
        beat->inside = PyThread_get_thread_ident();
    PyObject *result = method ? PyObject_Call(method, args, kwargs) : NULL;
    if (before >= 0)
        leave_call(beat, before, result != NULL);
    Py_XDECREF(method);
    return result;
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

static PyType_Slot call_gate_slots[] = {
    {Py_tp_doc, "CallGate(*, original, general, beat, flags, ask, fail, phase)\n\n"
                "The method that calls modules: torch's own inside a quiet call, the general one where a call is not quiet.\n"
                "``ask`` returns None unless torch.jit traces; ``fail`` answers for an exception."},
    GATE_SLOTS,
    {Py_tp_descr_get, bind_call},
    {Py_tp_call, call_general},
    {0, NULL},
};

static PyType_Spec call_gate_spec = {
    "clew.stats._kernel.CallGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, call_gate_slots,
};

/* ---------------------------------------------------------------- backward passes */

static int is_usual_pass(const Gate *gate, PyObject *args)
{
    const Beat *beat = (const Beat *)gate->beat;
    const Course *course = (const Course *)gate->course;
    return PyTuple_Size(args) > 0 && PyTuple_GetItem(args, 0) != Py_None && is_recorded_here(beat) && !((const Holder *)beat->owner)->is_shared &&
           PyDict_Size(gate->entries) == beat->quiet_with && PyDict_Size(course->known) == course->looked_at &&
           course->usual_passes <= 1 && !is_compiling(gate->flags) && has_answer(ask_mode, Py_False) && !PyErr_Occurred();
}

static PyObject *end_gated_pass(Gate *gate, int before, PyObject *result)
{
    int ended = end_pass((Course *)gate->course, (Beat *)gate->beat, before);
    if (ended < 0)
        excuse(gate->fail);
    if (ended != 1) {
        PyObject *done = PyObject_CallFunction(gate->finish, "Oi", Py_None, before);
        PyErr_Clear();
        Py_XDECREF(done);
    }
    return result;
}

/* The pass has raised: `finish` is told of its root, and the exception goes on. */
static PyObject *abandon_pass(Gate *gate, int before, PyObject *root)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = PyObject_CallFunction(gate->finish, "Oi", root, before);
    PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
    return NULL;
}

static PyObject *call_pass(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    int before = -1;
    if (is_usual_pass(gate, args)) {
        PyObject *root = PyTuple_GetItem(args, 0);
        before = begin_pass(beat, beat->wants_loss ? root : Py_None, gate->phase);
        if (before < -1)
            excuse(gate->fail);
    }
    PyErr_Clear();
    if (before < 0)
        return PyObject_Call(gate->general, args, kwargs);
    Py_INCREF(self);
    PyObject *result = PyObject_Call(gate->original, args, kwargs);
    result = result ? end_gated_pass(gate, before, result) : abandon_pass(gate, before, PyTuple_GetItem(args, 0));
    Py_DECREF(self);
    return result;
}

static PyType_Slot pass_gate_slots[] = {
    {Py_tp_doc, "PassGate(*, original, general, beat, course, entries, flags, fail, finish, phase)\n\n"
                "A backward pass: a usual one goes straight to torch. ``entries`` are the optimizers; ``finish`` is called with\n"
                "None and the phase before where somebody is to be told of its end, and with its root where it has raised."},
    GATE_SLOTS,
    {Py_tp_call, call_pass},
    {Py_tp_getattro, ask_gate},
    {0, NULL},
};

static PyType_Spec pass_gate_spec = {
    "clew.stats._kernel.PassGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, pass_gate_slots,
};

/* ---------------------------------------------------------------- steps of optimizers */

/* When the signature of the loop is taken: what its end of a step counts. The base of `Signature`. */
typedef struct {
    PyObject_HEAD
    PyObject *reason;
    long steps, turn;
    double lowest, highest;
} Turns;

static PyMemberDef turns_members[] = {
    {"reason", T_OBJECT_EX, offsetof(Turns, reason), 0, NULL}, {"steps", T_LONG, offsetof(Turns, steps), 0, NULL},
    {"turn", T_LONG, offsetof(Turns, turn), 0, NULL},          {"lowest", T_DOUBLE, offsetof(Turns, lowest), 0, NULL},
    {"highest", T_DOUBLE, offsetof(Turns, highest), 0, NULL},  {NULL, 0, 0, 0, NULL},
};

static int traverse_turns(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, turns_members, visit, arg);
}

static int clear_turns(PyObject *self)
{
    return clear_fields(self, turns_members);
}

static void free_turns(PyObject *self)
{
    release_object(self, clear_turns);
}

static PyType_Slot turns_slots[] = {
    {Py_tp_doc, "Turns()\n\nWhat the signature of a loop counts at the end of a step."},
    {Py_tp_dealloc, free_turns},
    {Py_tp_traverse, traverse_turns},
    {Py_tp_clear, clear_turns},
    {Py_tp_members, turns_members},
    {0, NULL},
};

static PyType_Spec turns_spec = {
    "clew.stats._kernel.Turns", sizeof(Turns), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, turns_slots,
};

/* Whether the end of a step was counted, and there is nothing else to it. */
static int count_turn(const Beat *beat)
{
    if (beat->turns == Py_None)
        return 1;
    if (!beat->turns || !PyObject_TypeCheck(beat->turns, turns_type))
        return 0;
    Turns *turns = (Turns *)beat->turns;
    double loss = beat->last_loss != Py_None ? PyFloat_AsDouble(beat->last_loss) : turns->lowest;
    if (PyUnicode_GetLength(turns->reason) || turns->turn <= 1 || !(turns->lowest <= loss && loss <= turns->highest))
        return 0;
    turns->steps++;
    turns->turn--;
    return 1;
}

static int is_unheard(const Gate *gate)
{
    PyObject *modes = has_answer(ask_mode, Py_False) ? PyObject_CallFunctionObjArgs(gate->ask, NULL) : NULL;
    int none = modes && PyObject_Not(modes) == 1;
    Py_XDECREF(modes);
    return none && !PyErr_Occurred();
}

static PyObject *pass_on(PyObject *function, PyObject *const *args)
{
    PyErr_Clear();
    return PyObject_CallFunctionObjArgs(function, args[0], args[1], args[2], NULL);
}

/* before(optimizer, args, kwargs): the hook in front of a step. */
static PyObject *step_before(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    if (!has_count(n, 3))
        return NULL;
    if (beat->asleep != Py_False)
        Py_RETURN_NONE;
    if (!is_recorded_here(beat) || beat->updating || beat->due != Py_False || beat->closing != Py_False ||
        !is_empty(beat->on_stepping) || !is_empty(beat->signing) || !is_unheard(gate))
        return pass_on(gate->original, args);
    beat->updating = 1;
    beat->resumes = switch_phase((Clock *)beat->clock, gate->phase);
    Py_RETURN_NONE;
}

static PyObject *find_entry(const Gate *gate, PyObject *optimizer)
{
    PyObject *id = PyLong_FromVoidPtr(optimizer), *entry = id ? PyDict_GetItemWithError(gate->entries, id) : NULL;
    Py_XDECREF(id);
    return entry;
}

/* -1: nothing was done. */
static int end_gated_update(const Gate *gate, PyObject *optimizer)
{
    Beat *beat = (Beat *)gate->beat;
    PyObject *entry = find_entry(gate, optimizer);
    PyObject *groups = entry ? PyObject_GetAttr(optimizer, str_param_groups) : NULL;
    PyObject *frame = groups ? (PyObject *)PyEval_GetFrame() : NULL;
    int told = UNUSUAL;
    if (frame && PyList_Check(groups))
        told = end_update((Course *)gate->course, beat, entry, groups, gate->lists, beat->resumes, frame);
    Py_XDECREF(groups);
    return told;
}

/* after(optimizer, args, kwargs): the hook behind a step. */
static PyObject *step_after(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    if (!has_count(n, 3))
        return NULL;
    if (!beat->updating || beat->asleep != Py_False)
        Py_RETURN_NONE;
    if (!is_recorded_here(beat) || beat->updating != 1 || beat->due != Py_False || !is_empty(beat->on_stepped) ||
        !is_unheard(gate))
        return pass_on(gate->general, args);
    int told = end_gated_update(gate, args[0]);
    if (told < 0)
        return pass_on(gate->general, args);
    beat->updating = 0;
    if (told == TOLD && count_turn(beat))
        Py_RETURN_NONE;
    return PyObject_CallFunction(gate->finish, "i", told);
}

static PyMethodDef step_gate_methods[] = {
    FAST("before", step_before, "before(optimizer, args, kwargs)\n\nThe hook in front of a step."),
    FAST("after", step_after, "after(optimizer, args, kwargs)\n\nThe hook behind a step."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot step_gate_slots[] = {
    {Py_tp_doc, "StepGate(*, original, general, beat, course, entries, ask, finish, lists, phase)\n\n"
                "The hooks around steps of optimizers; ``original`` and ``general`` are the general ones before and after.\n"
                "``ask`` returns how many dispatch modes are on, ``lists`` are the keys that tell of a group; ``finish`` is\n"
                "called with whether the snapshots were told, where they were not or the signature has a turn."},
    GATE_SLOTS,
    {Py_tp_methods, step_gate_methods},
    {0, NULL},
};

static PyType_Spec step_gate_spec = {
    "clew.stats._kernel.StepGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, step_gate_slots,
};

/* ---------------------------------------------------------------- what somebody may listen to */

static PyObject *bind_idle(PyObject *self, PyObject *object, PyObject *type)
{
    Gate *gate = (Gate *)self;
    int idle = 1;
    if (!object || object == Py_None)
        return Py_NewRef(gate->general);
    for (Py_ssize_t i = 0; idle && i < PyTuple_Size(gate->lists); i++)
        idle = is_empty(PyTuple_GetItem(gate->lists, i));
    return bind(idle ? gate->original : gate->general, object, type);
}

static PyType_Slot idle_gate_slots[] = {
    {Py_tp_doc, "IdleGate(*, original, general, lists)\n\n"
                "A method that is torch's own while all these lists of listeners are empty, and the general one otherwise."},
    GATE_SLOTS,
    {Py_tp_descr_get, bind_idle},
    {Py_tp_call, call_general},
    {0, NULL},
};

static PyType_Spec idle_gate_spec = {
    "clew.stats._kernel.IdleGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, idle_gate_slots,
};

static PyObject *call_loss(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Gate *gate = (Gate *)self;
    int is_plain = ((Beat *)gate->beat)->asleep != Py_False || is_grad_on();
    PyErr_Clear();
    return PyObject_Call(is_plain ? gate->original : gate->general, args, kwargs);
}

static PyType_Slot loss_gate_slots[] = {
    {Py_tp_doc, "LossGate(*, original, general, beat)\n\n"
                "A function that is torch's own while there are gradients, and the general one where there are none."},
    GATE_SLOTS,
    {Py_tp_call, call_loss},
    {Py_tp_getattro, ask_gate},
    {0, NULL},
};

static PyType_Spec loss_gate_spec = {
    "clew.stats._kernel.LossGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, loss_gate_slots,
};

/* ---------------------------------------------------------------- the types */

static int add_gates(PyObject *module)
{
    return (str_is_compiling = PyUnicode_InternFromString("_is_compiling_flag")) &&
           (str_param_groups = PyUnicode_InternFromString("param_groups")) &&
           (str_class = PyUnicode_InternFromString("__class__")) && add_type(module, "Holder", &holder_spec, &holder_type) &&
           add_type(module, "Turns", &turns_spec, &turns_type) &&
           add_type(module, "GatedCall", &gated_call_spec, &gated_call_type) &&
           add_type(module, "CallGate", &call_gate_spec, NULL) && add_type(module, "PassGate", &pass_gate_spec, NULL) &&
           add_type(module, "StepGate", &step_gate_spec, NULL) && add_type(module, "IdleGate", &idle_gate_spec, NULL) &&
           add_type(module, "LossGate", &loss_gate_spec, NULL);
}

/* Add the types to the module. */
static int add_types(PyObject *module)
{
    return intern_names() && intern_leaf_names() && intern_course_names() &&
           (str_training = PyUnicode_InternFromString("training")) &&
           (str_loss = PyUnicode_InternFromString("loss")) && add_type(module, "Clock", &clock_spec, &clock_type) &&
           add_type(module, "Tray", &tray_spec, &tray_type) && add_type(module, "Hook", &hook_spec, NULL) &&
           add_type(module, "Leaf", &leaf_spec, NULL) && add_type(module, "Ledger", &ledger_spec, &ledger_type) &&
           add_type(module, "Beat", &beat_spec, &beat_type) && add_type(module, "Course", &course_spec, &course_type) &&
           add_gates(module);
}
#endif
