/* Gates at backward passes, steps of optimizers, cleared gradients and losses; see _gates.h.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

/* ---------------------------------------------------------------- backward passes */

static int is_usual_pass(const Gate *gate, PyObject *args)
{
    const Beat *beat = (const Beat *)gate->beat;
    const Course *course = (const Course *)gate->course;
    return PyTuple_Size(args) > 0 && PyTuple_GetItem(args, 0) != Py_None && is_recorded_here(beat) &&
           !((const Holder *)beat->owner)->is_shared &&
           has_known_optimizers(beat, course, gate->entries) && course->usual_passes <= 1 && !is_compiling(gate->flags) && has_answer(ask_mode, Py_False) && !PyErr_Occurred();
}

static PyObject *end_gated_pass(Gate *gate, int before, PyObject *result)
{
    Beat *beat = (Beat *)gate->beat;
    int ended = end_pass((Course *)gate->course, beat, before), fine = 1;
    if (ended < 0 && !excuse(gate->fail)) {
        switch_phase((Clock *)beat->clock, before);
        fine = 0;
    } else if (ended != 1) {
        PyObject *done = PyObject_CallFunction(gate->finish, "Oi", Py_None, before);
        fine = done != NULL;
        Py_XDECREF(done);
    }
    if (!fine)
        Py_CLEAR(result);
    return result;
}

/* The pass has raised: `finish` is told of its root, and the exception goes on. */
static PyObject *abandon_pass(Gate *gate, int before, PyObject *root)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = PyObject_CallFunction(gate->finish, "Oi", root, before);
    if (done || is_ours()) {
        PyErr_Restore(type, error, trace);
    } else { /* Ctrl-C, meanwhile */
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    Py_XDECREF(done);
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
    }
    if (PyErr_Occurred() && !excuse(gate->fail))
        return NULL;
    if (before < 0)
        return PyObject_Call(gate->general, args, kwargs);
    Py_INCREF(self);
    PyObject *result = PyObject_Call(gate->original, args, kwargs);
    result = result ? end_gated_pass(gate, before, result) : abandon_pass(gate, before, PyTuple_GetItem(args, 0));
    Py_DECREF(self);
    return result;
}

MAKES(make_pass_gate, ORIGINAL | GENERAL | BEAT | FLIGHT | ENTRIES | FLAGS | FAIL | FINISH)

static PyType_Slot pass_gate_slots[] = {
    {Py_tp_doc, "PassGate(*, original, general, beat, course, entries, flags, fail, finish, phase)\n\n"
                "A backward pass: a usual one goes straight to torch. ``entries`` are the optimizers; ``finish`` is called with\n"
                "None and the phase before where somebody is to be told of its end, and with its root where it has raised."},
    GATE_SLOTS(make_pass_gate),
    {Py_tp_methods, function_methods},
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
    int is_known = beat->last_loss == Py_None || PyFloat_CheckExact(beat->last_loss);
    if (!is_known || !turns->reason || PyObject_IsTrue(turns->reason) != 0 || turns->turn <= 1)
        return 0;
    double loss = beat->last_loss != Py_None ? PyFloat_AsDouble(beat->last_loss) : turns->lowest;
    if (!(turns->lowest <= loss && loss <= turns->highest))
        return 0;
    turns->steps++;
    turns->turn--;
    return 1;
}

/* Go on by the general way, which meets an exception of ours again; the user's goes on. */
static PyObject *pass_on(PyObject *function, PyObject *const *args)
{
    if (PyErr_Occurred() && !is_ours())
        return NULL;
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
        !is_empty(beat->on_stepping) || !is_empty(beat->signing) || !is_unheard(gate->ask))
        return pass_on(gate->original, args);
    beat->updating = 1;
    int before = switch_phase((Clock *)beat->clock, gate->phase);
    beat->resumes = before == gate->phase ? REST : before; /* an exception inside the last step has left the clock there */
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
    Py_XINCREF(entry); /* asking the optimizer may run anything */
    PyObject *groups = entry ? PyObject_GetAttr(optimizer, str_param_groups) : NULL;
    PyObject *frame = groups ? (PyObject *)PyEval_GetFrame() : NULL;
    int told = UNUSUAL;
    if (frame && PyList_Check(groups))
        told = end_update((Course *)gate->course, beat, entry, groups, gate->lists, beat->resumes, frame);
    Py_XDECREF(entry);
    Py_XDECREF(groups);
    if (told == UNUSUAL && beat->closing == Py_True && PyErr_Occurred() && excuse(gate->fail)) {
        switch_phase((Clock *)beat->clock, beat->resumes);
        told = TOLD; /* it was counted, and something after that has failed */
    }
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
        !is_unheard(gate->ask))
        return pass_on(gate->general, args);
    int told = end_gated_update(gate, args[0]);
    if (told < 0)
        return pass_on(gate->general, args);
    beat->updating = 0;
    int counted = count_turn(beat);
    if (told == TOLD && counted)
        Py_RETURN_NONE;
    return PyObject_CallFunction(gate->finish, "ii", told, counted);
}

static PyMethodDef step_gate_methods[] = {
    FAST("before", step_before, "before(optimizer, args, kwargs)\n\nThe hook in front of a step."),
    FAST("after", step_after, "after(optimizer, args, kwargs)\n\nThe hook behind a step."),
    {NULL, NULL, 0, NULL},
};

MAKES(make_step_gate, ORIGINAL | GENERAL | BEAT | FLIGHT | ENTRIES | ASK | FAIL | FINISH | LISTS)

static PyType_Slot step_gate_slots[] = {
    {Py_tp_doc, "StepGate(*, original, general, beat, course, entries, ask, fail, finish, lists, phase)\n\n"
                "The hooks around steps of optimizers; ``original`` and ``general`` are the general ones before and after.\n"
                "``ask`` returns how many dispatch modes are on, ``lists`` are the keys that tell of a group; ``finish`` is\n"
                "called with whether the snapshots were told and the signature has counted, unless both."},
    GATE_SLOTS(make_step_gate),
    {Py_tp_methods, step_gate_methods},
    {0, NULL},
};

static PyType_Spec step_gate_spec = {
    "clew.stats._kernel.StepGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, step_gate_slots,
};

/* ---------------------------------------------------------------- what somebody may listen to */

/* What is called at the moment: torch's own while all lists of listeners are empty. */
static PyObject *choose_idle(const Gate *gate)
{
    int idle = 1;
    for (Py_ssize_t i = 0; idle && i < PyTuple_Size(gate->lists); i++)
        idle = is_empty(PyTuple_GetItem(gate->lists, i));
    return idle ? gate->original : gate->general;
}

static PyObject *bind_idle(PyObject *self, PyObject *object, PyObject *type)
{
    Gate *gate = (Gate *)self;
    if (!object || object == Py_None)
        return Py_NewRef(gate->general);
    return bind(choose_idle(gate), object, type);
}

MAKES(make_idle_gate, ORIGINAL | GENERAL | LISTS)

static PyType_Slot idle_gate_slots[] = {
    {Py_tp_doc, "IdleGate(*, original, general, lists)\n\n"
                "A method that is torch's own while all these lists of listeners are empty, and the general one otherwise."},
    GATE_SLOTS(make_idle_gate),
    {Py_tp_descr_get, bind_idle},
    {Py_tp_call, call_general},
    {0, NULL},
};

static PyType_Spec idle_gate_spec = {
    "clew.stats._kernel.IdleGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, idle_gate_slots,
};

static PyObject *call_idle(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return PyObject_Call(choose_idle((Gate *)self), args, kwargs);
}

static PyType_Slot look_gate_slots[] = {
    {Py_tp_doc, "LookGate(*, original, general, lists)\n\n"
                "A function that is torch's own while all these lists are empty, and the general one otherwise."},
    GATE_SLOTS(make_idle_gate),
    {Py_tp_methods, function_methods},
    {Py_tp_call, call_idle},
    {Py_tp_getattro, ask_gate},
    {0, NULL},
};

static PyType_Spec look_gate_spec = {
    "clew.stats._kernel.LookGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, look_gate_slots,
};

static PyObject *call_loss(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Gate *gate = (Gate *)self;
    int is_plain = ((Beat *)gate->beat)->asleep != Py_False || is_grad_on();
    PyErr_Clear();
    return PyObject_Call(is_plain ? gate->original : gate->general, args, kwargs);
}

MAKES(make_loss_gate, ORIGINAL | GENERAL | BEAT)

static PyType_Slot loss_gate_slots[] = {
    {Py_tp_doc, "LossGate(*, original, general, beat)\n\n"
                "A function that is torch's own while there are gradients, and the general one where there are none."},
    GATE_SLOTS(make_loss_gate),
    {Py_tp_methods, function_methods},
    {Py_tp_call, call_loss},
    {Py_tp_getattro, ask_gate},
    {0, NULL},
};

static PyType_Spec loss_gate_spec = {
    "clew.stats._kernel.LossGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, loss_gate_slots,
};

/* ---------------------------------------------------------------- the types */

/* What a gate answers itself. */
static PyObject *make_names(void)
{
    PyObject *names = Py_BuildValue("(sssss)", "__class__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__");
    PyObject *set = names ? PyFrozenSet_New(names) : NULL;
    Py_XDECREF(names);
    return set;
}

static int add_gates(PyObject *module)
{
    return (str_is_compiling = PyUnicode_InternFromString("_is_compiling_flag")) &&
           (str_param_groups = PyUnicode_InternFromString("param_groups")) &&
           (own_names = make_names()) && add_type(module, "Holder", &holder_spec, &holder_type) &&
           add_type(module, "Turns", &turns_spec, &turns_type) &&
           add_type(module, "Updates", &updates_spec, &updates_type) &&
           add_type(module, "GatedCall", &gated_call_spec, &gated_call_type) &&
           add_type(module, "CallGate", &call_gate_spec, NULL) && add_type(module, "PassGate", &pass_gate_spec, NULL) &&
           add_type(module, "StepGate", &step_gate_spec, NULL) && add_type(module, "IdleGate", &idle_gate_spec, NULL) &&
           add_type(module, "LookGate", &look_gate_spec, NULL) && add_type(module, "LossGate", &loss_gate_spec, NULL) &&
           add_type(module, "FetchGate", &fetch_gate_spec, NULL) &&
           add_type(module, "IndexGate", &index_gate_spec, NULL);
}

/* Add the types to the module. */
static int add_types(PyObject *module)
{
    return intern_names() && intern_leaf_names() && intern_shelf_names() &&
           (str_training = PyUnicode_InternFromString("training")) &&
           (str_loss = PyUnicode_InternFromString("loss")) && add_type(module, "Clock", &clock_spec, &clock_type) &&
           add_type(module, "Tray", &tray_spec, &tray_type) && add_type(module, "Hook", &hook_spec, NULL) &&
           add_type(module, "Leaf", &leaf_spec, &leaf_type) && add_type(module, "Ledger", &ledger_spec, &ledger_type) &&
           add_type(module, "Source", &source_spec, &source_type) && add_type(module, "Shelf", &shelf_spec, &shelf_type) &&
           add_type(module, "Beat", &beat_spec, &beat_type) && add_type(module, "Course", &course_spec, &course_type) &&
           add_gates(module);
}
#endif
