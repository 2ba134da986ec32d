/* What a flight recorder keeps of a step, and the end of a usual one: an optimizer has stepped, its numbers are those it
   had before, and the state that the next step begins with is plain memory. It passes without a Python frame; whatever
   else may be is left, untouched, to the general way in Python, which does the same and more.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

enum { UNTOLD = 0, TOLD = 1, UNUSUAL = -1 };

static PyTypeObject *updates_type;

/* What a step touches of an optimizer; the base of `OptimizerEntry`. */
typedef struct {
    PyObject_HEAD
    PyObject *known_groups, *rates, *turn, *parameters, *tensors, *param_keys, *grad_keys, *shadows;
    long stepped, steps;
    char may_scale; /* it may take a scale off its gradients by itself, inside its step */
} Updates;

#define UPDATES(name) {#name, T_OBJECT_EX, offsetof(Updates, name), 0, NULL}

static PyMemberDef updates_members[] = {
    UPDATES(known_groups), UPDATES(rates),      UPDATES(turn),      UPDATES(parameters),
    UPDATES(tensors),      UPDATES(param_keys), UPDATES(grad_keys), UPDATES(shadows),
    {"stepped", T_LONG, offsetof(Updates, stepped), 0, NULL},
    {"steps", T_LONG, offsetof(Updates, steps), 0, NULL},
    {"may_scale", T_BOOL, offsetof(Updates, may_scale), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int traverse_updates(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, updates_members, visit, arg);
}

static int clear_updates(PyObject *self)
{
    return clear_fields(self, updates_members);
}

static void free_updates(PyObject *self)
{
    release_object(self, clear_updates);
}

static PyType_Slot updates_slots[] = {
    {Py_tp_doc, "Updates()\n\nWhat a step touches of an optimizer."},
    {Py_tp_dealloc, free_updates},
    {Py_tp_traverse, traverse_updates},
    {Py_tp_clear, clear_updates},
    {Py_tp_members, updates_members},
    {0, NULL},
};

static PyType_Spec updates_spec = {
    "clew.stats._kernel.Updates", sizeof(Updates), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    updates_slots,
};

typedef struct {
    PyObject_HEAD
    PyObject *frames, *buffers, *known, *blocks, *spare, *references, *outermost, *snapshots, *last_batch, *last_iterator;
    long trees, passes, usual_passes, look_at, looked_at, ended, ends;
    double ended_at, step_seconds;
    char has_loader, has_start;
} Course;

#define COURSE(name, type) {#name, type, offsetof(Course, name), 0, NULL}

static PyMemberDef course_members[] = {
    COURSE(frames, T_OBJECT_EX),
    COURSE(buffers, T_OBJECT_EX),
    COURSE(known, T_OBJECT_EX),
    COURSE(blocks, T_OBJECT_EX),
    COURSE(spare, T_OBJECT_EX),
    COURSE(references, T_OBJECT_EX),
    COURSE(outermost, T_OBJECT_EX),
    COURSE(snapshots, T_OBJECT_EX),
    COURSE(last_batch, T_OBJECT_EX),
    COURSE(last_iterator, T_OBJECT_EX),
    COURSE(trees, T_LONG),
    COURSE(passes, T_LONG),
    COURSE(usual_passes, T_LONG),
    COURSE(look_at, T_LONG),
    COURSE(looked_at, T_LONG),
    COURSE(ended, T_LONG),
    COURSE(ends, T_LONG),
    COURSE(ended_at, T_DOUBLE),
    COURSE(step_seconds, T_DOUBLE),
    COURSE(has_loader, T_BOOL),
    COURSE(has_start, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static int traverse_course(PyObject *self, visitproc visit, void *arg)
{
    return visit_fields(self, course_members, visit, arg);
}

static int clear_course(PyObject *self)
{
    return clear_fields(self, course_members);
}

static void free_course(PyObject *self)
{
    release_object(self, clear_course);
}

/* ---------------------------------------------------------------- the pace of the steps */

/* A step has ended: how long it took. The shortest of late counts: a validation pass makes a step look long. */
static void keep_pace(Course *course, long step, double now)
{
    if (course->ended_at != 0.0) {
        double spent = now - course->ended_at, limit = 1.1 * course->step_seconds;
        course->step_seconds = spent < limit || limit == 0.0 ? spent : limit;
    }
    course->ended = step;
    course->ends = 1;
    course->ended_at = now;
}

static PyObject *course_rest(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((Course *)self)->ended_at = read_seconds();
    Py_RETURN_NONE;
}

static PyObject *course_keep_pace(PyObject *self, PyObject *step)
{
    long number = PyLong_AsLong(step);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    keep_pace((Course *)self, number, read_seconds());
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- the end of a usual pass */

/* Whether that is all; -1 with an error set. */
static int end_pass(Course *course, Beat *beat, int phase)
{
    Clock *clock = (Clock *)beat->clock;
    switch_phase(clock, clock->own);
    set_field(&beat->in_backward, PyLong_FromLong(0));
    set_field(&beat->backward_at, Py_NewRef(beat->serial));
    int quiet = beat->probing == Py_False && is_empty(beat->on_pass) &&
                judge_references(beat->due == Py_True ? course->references : course->outermost, 1) == IS_FINE;
    if (PyErr_Occurred())
        return -1;
    if (quiet) {
        course->passes++;
        switch_phase(clock, phase);
    }
    return quiet;
}

/* end_pass(beat, phase). */
static PyObject *course_end_pass(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!has_count(n, 2))
        return NULL;
    int ended = end_pass((Course *)self, (Beat *)args[0], (int)read_long(args[1]));
    return ended < 0 ? NULL : PyBool_FromLong(ended);
}

/* ---------------------------------------------------------------- the end of a usual step */

/* Whether the state that the next step begins with is plain memory, or known by its batch. Buffers are copied here: what
   goes on by the general way copies them again. */
static int has_plain_start(const Course *course)
{
    if (course->has_loader)
        return 1;
    int plain = !course->has_start && PyBytes_Check(course->blocks) && PyDict_Size(course->known) == course->trees &&
                copy_buffers(course->buffers);
    PyErr_Clear();
    return plain;
}

/* Whether groups are as they were when their numbers were last taken; in a step that is recorded, all their numbers. */
static int are_known(const Beat *beat, PyObject *groups, PyObject *known, PyObject *keys)
{
    if (!has_same_groups(groups, known, keys))
        return 0;
    return beat->due != Py_True || PyObject_RichCompareBool(groups, known, Py_EQ) == 1;
}

/* Whether the rates of an optimizer were taken: its groups have the very same ones as when they last were. */
static int take_rates(Beat *beat, const Updates *entry, PyObject *groups, PyObject *keys)
{
    PyObject *known = entry->known_groups, *rates = entry->rates;
    if (!known || !rates)
        return 0;
    Py_INCREF(known); /* comparing may run anything */
    int same = are_known(beat, groups, known, keys);
    Py_DECREF(known);
    Py_ssize_t end = PyList_Size(beat->scalars);
    return same && entry->rates && PyList_SetSlice(beat->scalars, end, end, entry->rates) == 0;
}

static void count_step(const Beat *beat, Updates *entry)
{
    entry->stepped = read_long(beat->serial);
    entry->steps++;
}

static int mark_course(Beat *beat, Course *course, PyObject *frame)
{
    if (!put_frames(frame, course->frames) || PyList_SetSlice(beat->calls, 0, PyList_Size(beat->calls), NULL) < 0)
        return 0;
    course->usual_passes = course->passes;
    course->passes = 0;
    if (course->has_loader)
        return 1;
    keep_pace(course, read_long(beat->step), read_seconds());
    return take_random(course->blocks, course->spare);
}

/* The snapshots, or NULL where there are none, or none that can be told here. */
static Shelf *find_shelf(const Course *course)
{
    return course->snapshots && PyObject_TypeCheck(course->snapshots, shelf_type) ? (Shelf *)course->snapshots : NULL;
}

/* Tell the snapshots that a step has ended in which a loader gave the batches; 0 with nothing done where it is not a usual
   one, -1 with an error set. */
static int tell_shelf(Course *course, const Beat *beat)
{
    Shelf *shelf = find_shelf(course);
    if (!shelf)
        return course->snapshots == Py_None;
    long step = read_long(beat->step);
    if (shelf->is_ending || step == course->ended)
        return 0;
    int closed = close_entry(shelf, beat->step);
    if (closed == 1)
        keep_pace(course, step, read_seconds());
    return closed;
}

/* What is to be told, or UNUSUAL, perhaps with an error set: then nothing was done that is not done again, or it failed.
   `frame` holds the loop, or is held by what does. */
static int end_update(Course *course, Beat *beat, PyObject *entry, PyObject *groups, PyObject *keys, int phase, PyObject *frame)
{
    Clock *clock = (Clock *)beat->clock;
    switch_phase(clock, clock->own);
    if (!PyObject_TypeCheck(entry, updates_type) || beat->closing != Py_False || beat->is_followed != Py_False ||
        read_long(beat->step) >= course->look_at || !has_plain_start(course) ||
        !take_rates(beat, (Updates *)entry, groups, keys))
        return UNUSUAL;
    count_step(beat, (Updates *)entry);
    set_flag(&beat->closing, 1);
    switch_phase(clock, phase);
    mark_clock(clock);
    switch_phase(clock, clock->own);
    if (!mark_course(beat, course, frame))
        return UNUSUAL;
    int told = course->has_loader ? tell_shelf(course, beat) : 1;
    if (told != 1)
        return told ? UNUSUAL : UNTOLD;
    switch_phase(clock, phase);
    return TOLD;
}

/* end_update(beat, entry, groups, keys, phase): the frames that hold the loop are those behind the caller, which is ours. */
static PyObject *course_end_update(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!has_count(n, 5))
        return NULL;
    Beat *beat = (Beat *)args[0];
    if (args[1] == Py_None || !PyObject_TypeCheck(args[0], beat_type) || Py_TYPE(beat->clock) != clock_type)
        return PyLong_FromLong(UNUSUAL);
    PyObject *own = (PyObject *)PyEval_GetFrame(), *frame = own ? PyObject_GetAttr(own, str_f_back) : NULL;
    int told = UNUSUAL;
    if (frame)
        told = end_update((Course *)self, beat, args[1], args[2], args[3], (int)read_long(args[4]), frame);
    Py_XDECREF(frame);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(told);
}

static PyMethodDef course_methods[] = {
    {"keep_pace", course_keep_pace, METH_O,
     "keep_pace(step)\n\nA step has ended: take how long it took, the shortest of late."},
    {"rest", course_rest, METH_NOARGS, "rest()\n\nLet the next step begin now: what went before was none of it."},
    FAST("end_pass", course_end_pass,
         "end_pass(beat, phase) -> bool\n\n"
         "End the backward pass that ``begin_pass`` began, and go on in a phase. False, on clew's own time: a gradient may be\n"
         "bad, or somebody is to be told, which is left to the general way."),
    FAST("end_update", course_end_update,
         "end_update(beat, entry, groups, keys, phase) -> int\n\n"
         "End a step in which one optimizer has stepped, and go on in a phase; what is to be measured is. 1: all is done; 0: the\n"
         "snapshots are still to be told, on clew's own time; -1, with nothing done but that, leaves it to the general way. For\n"
         "the hook that torch calls: the frames of the loop are those behind it."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot course_slots[] = {
    {Py_tp_doc, "Course()\n\nWhat the end of a usual step touches of a flight recorder."},
    {Py_tp_dealloc, free_course},
    {Py_tp_traverse, traverse_course},
    {Py_tp_clear, clear_course},
    {Py_tp_methods, course_methods},
    {Py_tp_members, course_members},
    {0, NULL},
};

static PyType_Spec course_spec = {
    "clew.stats._kernel.Course", sizeof(Course), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    course_slots,
};

/* ---------------------------------------------------------------- the types */

static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromSpec(spec);
    if (kept)
        *kept = (PyTypeObject *)type;
    return type && PyModule_AddObject(module, name, type) == 0;
}
#endif
