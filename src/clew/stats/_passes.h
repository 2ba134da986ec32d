/* Gates at backward passes, cleared gradients and losses; see _gates.h.

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
    return intern_names() && intern_leaf_names() && intern_step_names() && intern_shelf_names() &&
           (str_training = PyUnicode_InternFromString("training")) &&
           (str_loss = PyUnicode_InternFromString("loss")) && intern_beat_names() && add_type(module, "Clock", &clock_spec, &clock_type) &&
           add_type(module, "Latch", &latch_spec, &latch_type) && add_type(module, "Tray", &tray_spec, &tray_type) && add_type(module, "Hook", &hook_spec, NULL) &&
           add_type(module, "Leaf", &leaf_spec, &leaf_type) && add_type(module, "Place", &place_spec, &place_type) && add_type(module, "Ledger", &ledger_spec, &ledger_type) &&
           add_type(module, "Source", &source_spec, &source_type) && add_type(module, "Shelf", &shelf_spec, &shelf_type) &&
           add_type(module, "Beat", &beat_spec, &beat_type) && add_type(module, "Course", &course_spec, &course_type) &&
           add_gates(module);
}
#endif
