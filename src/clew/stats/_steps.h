/* Gates at the steps of optimizers; see _gates.h. In a step that is recorded they measure what the optimizer uses.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

static PyObject *str_added, *str_rest, *str_take;

static int intern_step_names(void)
{
    return (str_added = PyUnicode_InternFromString("added")) &&
           (str_rest = PyUnicode_InternFromString("measure_rest")) && (str_take = PyUnicode_InternFromString("take"));
}

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

static PyObject *find_entry(const Gate *gate, PyObject *optimizer)
{
    PyObject *id = PyLong_FromVoidPtr(optimizer), *entry = id ? PyDict_GetItemWithError(gate->entries, id) : NULL;
    Py_XDECREF(id);
    return entry;
}

/* ---------------------------------------------------------------- before a recorded step */

/* Whether every known parameter is held by an optimizer. */
static int is_alone(const Beat *beat)
{
    return beat->alone_at >= 0 && read_integer(beat->registry, str_added) == beat->alone_at;
}

/* Whether asking these tensors runs no code of a class of the user's. */
static int are_plain(PyObject *tensors)
{
    int plain = 1;
    for (Py_ssize_t i = 0; plain && i < PyList_Size(tensors); i++)
        plain = is_plain_type(PyList_GetItem(tensors, i));
    return plain;
}

static int is_whole(const Updates *entry)
{
    return entry->turn && entry->parameters && entry->tensors && entry->param_keys && entry->grad_keys && entry->shadows;
}

/* Whether a step was called with nothing but its optimizer: with a closure, forward and backward are still to come. */
static int has_no_closure(PyObject *const *args)
{
    return PyTuple_Check(args[1]) && PyTuple_Size(args[1]) == 1 && PyDict_Check(args[2]) && PyDict_Size(args[2]) == 0;
}

/* Whether the parameters are those known, measured for the first time in this step. */
static int may_measure(const Beat *beat, const Updates *entry, PyObject *optimizer)
{
    if (entry->may_scale || Py_TYPE(beat->tray) != tray_type || !is_whole(entry) || !is_alone(beat) ||
        PyDict_Contains(beat->latest_rows, entry->turn) != 0 || !are_plain(entry->tensors))
        return 0;
    PyObject *groups = PyObject_GetAttr(optimizer, str_param_groups);
    int same = groups && holds_all(groups, entry->parameters);
    Py_XDECREF(groups);
    return same;
}

/* Measure tensors while the lock is held; 0 with an error set. */
static int measure_under(Tray *tray, PyObject *tensors, PyObject *keys)
{
    PyObject *given[] = {Py_NewRef(tensors), Py_NewRef(keys)}, *first = PyLong_FromSsize_t(PyList_Size(tray->owner->keys));
    PyObject *left = first && PyList_Size(tensors) ? tray_measure_many((PyObject *)tray, given, 2) : NULL;
    int done = left ? PyList_Check(left) && PyList_Size(left) == 0 : !PyErr_Occurred();
    if (left && !done) {
        PyObject *answer = PyObject_CallMethodObjArgs((PyObject *)tray->owner, str_rest, tensors, keys, left, first, NULL);
        done = answer != NULL;
        Py_XDECREF(answer);
    }
    Py_XDECREF(left);
    Py_XDECREF(first);
    Py_DECREF(tensors);
    Py_DECREF(keys);
    return done;
}

/* Remember which rows are of this optimizer: a step that has raised may be tried again. */
static int keep_rows(const Beat *beat, const Updates *entry, Py_ssize_t first)
{
    PyObject *rows = PyObject_CallFunction((PyObject *)&PyRange_Type, "nn", first, PyList_Size(beat->keys));
    int done = rows && PyDict_SetItem(beat->latest_rows, entry->turn, rows) == 0;
    Py_XDECREF(rows);
    return done;
}

static int take_shadows(const Updates *entry)
{
    PyObject *answer = PyObject_CallMethodObjArgs(entry->shadows, str_take, NULL);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Put the gradients that there are into one list, and their keys into another. */
static int gather_gradients(const Updates *entry, PyObject *gradients, PyObject *keys)
{
    int done = 1;
    for (Py_ssize_t i = 0; done && i < PyList_Size(entry->tensors); i++) {
        PyObject *gradient = PyObject_GetAttr(PyList_GetItem(entry->tensors, i), str_grad);
        done = gradient && (gradient == Py_None || (PyList_Append(gradients, gradient) == 0 &&
                                                    PyList_Append(keys, PyList_GetItem(entry->grad_keys, i)) == 0));
        Py_XDECREF(gradient);
    }
    return done;
}

static int measure_all(const Beat *beat, const Updates *entry, PyObject *gradients, PyObject *keys)
{
    Tray *tray = (Tray *)beat->tray;
    take_latch(tray->lock, -1);
    Py_ssize_t first = PyList_Size(beat->keys);
    int done = (!beat->wants_param || measure_under(tray, entry->tensors, entry->param_keys)) &&
               measure_under(tray, gradients, keys) && (!beat->wants_update || take_shadows(entry)) &&
               keep_rows(beat, entry, first);
    give_latch(tray->lock);
    return done;
}

/* Measure what an optimizer is about to use; -1 with an error set, 0 with nothing done where it is not a usual step. */
static int measure_before(const Beat *beat, const Updates *entry, PyObject *optimizer)
{
    if (!may_measure(beat, entry, optimizer))
        return 0;
    PyObject *gradients = PyList_New(0), *keys = PyList_New(0);
    int usual = gradients && keys && (!beat->wants_grad || gather_gradients(entry, gradients, keys)) && are_plain(gradients);
    int done = usual ? measure_all(beat, entry, gradients, keys) : 0;
    Py_XDECREF(gradients);
    Py_XDECREF(keys);
    return usual && !done ? -1 : done;
}

/* The same for the gate, which answers for exceptions of ours; -1 with one of the user's set. */
static int prepare_update(const Gate *gate, PyObject *const *args)
{
    const Beat *beat = (const Beat *)gate->beat;
    if (beat->due == Py_False)
        return 1;
    PyObject *entry = has_no_closure(args) ? find_entry(gate, args[0]) : NULL;
    if (!entry || !PyObject_TypeCheck(entry, updates_type))
        return 0;
    Py_INCREF(entry);
    int done = measure_before(beat, (Updates *)entry, args[0]);
    Py_DECREF(entry);
    return done < 0 ? excuse_at(gate->fail, "before the optimizer step") ? 1 : -1 : done;
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
    if (!is_recorded_here(beat) || beat->updating || beat->closing != Py_False || !is_empty(beat->on_stepping) ||
        !is_empty(beat->signing) || !is_unheard(gate->ask))
        return pass_on(gate->original, args);
    Clock *clock = (Clock *)beat->clock;
    int before = switch_phase(clock, clock->own), done = prepare_update(gate, args);
    switch_phase(clock, done == 1 ? gate->phase : before);
    if (done != 1)
        return pass_on(gate->original, args);
    beat->updating = 1;
    beat->resumes = before == gate->phase ? REST : before; /* an exception inside the last step has left the clock there */
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- after a step */

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

/* Measure what an optimizer has done; -1 with an exception of the user's set, 0 with nothing done: something may be bad. */
static int measure_after(const Gate *gate, PyObject *optimizer)
{
    const Beat *beat = (const Beat *)gate->beat;
    const Course *course = (const Course *)gate->course;
    if (beat->due == Py_False)
        return 1;
    if (beat->wants_after) {
        PyObject *answer = PyObject_CallFunctionObjArgs(gate->measure, optimizer, NULL);
        Py_XDECREF(answer);
        return answer ? 1 : -1;
    }
    if (((const Holder *)beat->owner)->is_shared)
        return 1;
    return PyDict_Size(course->known) == course->looked_at && judge_references(course->references, 0) == IS_FINE &&
           !PyErr_Occurred();
}

/* An interrupt of the user's goes on. */
static PyObject *leave_update(Beat *beat)
{
    beat->updating = 0;
    switch_phase((Clock *)beat->clock, beat->resumes);
    return NULL;
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
    int was_due = beat->due == Py_True;
    if (!is_recorded_here(beat) || beat->updating != 1 || !is_empty(beat->on_stepped) || !is_unheard(gate->ask) ||
        (was_due && !has_no_closure(args)))
        return pass_on(gate->general, args);
    Clock *clock = (Clock *)beat->clock;
    int before = switch_phase(clock, clock->own), measured = measure_after(gate, args[0]);
    if (measured < 0)
        return leave_update(beat);
    int told = measured ? end_gated_update(gate, args[0]) : UNUSUAL;
    if (told < 0 && !(was_due && measured)) {
        switch_phase(clock, before);
        return pass_on(gate->general, args);
    }
    if (PyErr_Occurred() && !excuse(gate->fail))
        return leave_update(beat);
    beat->updating = 0;
    int counted = count_turn(beat);
    if (told == TOLD && counted)
        Py_RETURN_NONE;
    return PyObject_CallFunction(gate->finish, "iiO", told, counted, args[0]);
}

static PyMethodDef step_gate_methods[] = {
    FAST("before", step_before, "before(optimizer, args, kwargs)\n\nThe hook in front of a step."),
    FAST("after", step_after, "after(optimizer, args, kwargs)\n\nThe hook behind a step."),
    {NULL, NULL, 0, NULL},
};

MAKES(make_step_gate, ORIGINAL | GENERAL | BEAT | FLIGHT | ENTRIES | ASK | FAIL | FINISH | LISTS | MEASURE)

static PyType_Slot step_gate_slots[] = {
    {Py_tp_doc, "StepGate(*, original, general, beat, course, entries, ask, fail, finish, lists, measure, phase)\n\n"
                "The hooks around steps of optimizers; ``original`` and ``general`` are the general ones before and after.\n"
                "``ask`` returns how many dispatch modes are on, ``lists`` are the keys that tell of a group; ``measure`` is\n"
                "called with the optimizer where updates, buffers or states are wanted; ``finish`` with whether the snapshots\n"
                "were told (-1: the step has still to end), whether the signature has counted, and the optimizer, unless both."},
    GATE_SLOTS(make_step_gate),
    {Py_tp_methods, step_gate_methods},
    {0, NULL},
};

static PyType_Spec step_gate_spec = {
    "clew.stats._kernel.StepGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, step_gate_slots,
};
#endif
