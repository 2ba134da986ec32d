/* The parts of a recorder that a quiet step touches, and such a step itself: one that is not recorded in full, of a loop
   in which nothing is new. Its events go by here without a Python frame. Whatever is unusual is left, untouched, to the
   general way in Python, which does the same and more.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK
#include <structmember.h>

enum { LONGEST_GAP = 1000, FIRST_STEPS = 16, SELDOM = 64 };

/* ---------------------------------------------------------------- what steps may cost */

typedef struct {
    PyObject_HEAD
    double share, bank, most, cost, unseen;
    long period, warmup_steps, forced_until, thinned, since_last;
} Ledger;

static PyTypeObject *ledger_type, *beat_type;
static PyObject *str_training, *str_loss;

static int is_due_at(const Ledger *ledger, long step)
{
    if (step < ledger->warmup_steps || step <= ledger->forced_until)
        return 1;
    if (ledger->period)
        return step % ledger->period == 0;
    return ledger->bank >= ledger->cost || ledger->since_last >= LONGEST_GAP;
}

/* Put a step's share of the time aside, and take what was ours in it. */
static void pay(Ledger *ledger, long step, double cost, double wall)
{
    if (ledger->share != 0.0 && step >= ledger->warmup_steps) {
        double spent = cost + ledger->unseen, saved = ledger->bank + ledger->share * (wall - spent) - spent;
        ledger->bank = saved < ledger->most ? saved : ledger->most;
    }
}

static PyObject *ledger_pay(PyObject *self, PyObject *args)
{
    long step;
    double cost, wall;
    if (!PyArg_ParseTuple(args, "ldd", &step, &cost, &wall))
        return NULL;
    pay((Ledger *)self, step, cost, wall);
    Py_RETURN_NONE;
}

static PyObject *ledger_is_due(PyObject *self, PyObject *step)
{
    long number = PyLong_AsLong(step);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(is_due_at((Ledger *)self, number));
}

static PyMethodDef ledger_methods[] = {
    {"pay", ledger_pay, METH_VARARGS,
     "pay(step, cost_seconds, wall_seconds)\n\n"
     "Put a step's share of the time aside, and take what clew has cost in it."},
    {"is_due", ledger_is_due, METH_O, "is_due(step) -> bool\n\nReturn whether this step is recorded in full."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef ledger_members[] = {
    {"share", T_DOUBLE, offsetof(Ledger, share), 0, NULL},
    {"bank", T_DOUBLE, offsetof(Ledger, bank), 0, NULL},
    {"most", T_DOUBLE, offsetof(Ledger, most), 0, NULL},
    {"cost", T_DOUBLE, offsetof(Ledger, cost), 0, NULL},
    {"unseen", T_DOUBLE, offsetof(Ledger, unseen), 0, NULL},
    {"period", T_LONG, offsetof(Ledger, period), 0, NULL},
    {"warmup_steps", T_LONG, offsetof(Ledger, warmup_steps), 0, NULL},
    {"forced_until", T_LONG, offsetof(Ledger, forced_until), 0, NULL},
    {"thinned", T_LONG, offsetof(Ledger, thinned), 0, NULL},
    {"since_last", T_LONG, offsetof(Ledger, since_last), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ledger_slots[] = {
    {Py_tp_doc, "Ledger()\n\nWhat the steps of a recording took and cost, and whether the next one is due."},
    {Py_tp_methods, ledger_methods},
    {Py_tp_members, ledger_members},
    {0, NULL},
};

static PyType_Spec ledger_spec = {
    "clew.stats._kernel.Ledger", sizeof(Ledger), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, ledger_slots,
};

/* ---------------------------------------------------------------- the state of a recording */

typedef struct {
    PyObject_HEAD
    PyObject *step, *serial, *ended, *losses, *in_backward;
    PyObject *backward_at, *closing, *due, *probing, *prompt, *is_followed, *has_output;
    PyObject *keys, *scalars, *batches, *waiting, *calls, *backlog, *no_rows;
    PyObject *last_loss, *lowest_loss;
    PyObject *calm, *on_root, *on_pass, *on_each_loss, *on_end, *on_seldom, *on_stepping, *on_stepped;
    PyObject *schedule, *clock, *call_type, *scalar_type, *asleep, *owner, *signing, *turns, *on_batch;
    double quiet_until;
    long longest_backlog, nested, quiet_with, updating;
    unsigned long inside, seeing; /* the thread that is in a quiet root call, or in one that is recorded, or 0 */
    int resumes, tag;             /* the phase that goes on after the step of an optimizer; what marks recorded calls */
    char wants_loss, fetching;
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
    FIELD(turns),         FIELD(on_batch),
    {"longest_backlog", T_LONG, offsetof(Beat, longest_backlog), 0, NULL},
    {"nested", T_LONG, offsetof(Beat, nested), 0, NULL},
    {"quiet_with", T_LONG, offsetof(Beat, quiet_with), 0, NULL},
    {"updating", T_LONG, offsetof(Beat, updating), 0, NULL},
    {"inside", T_ULONG, offsetof(Beat, inside), READONLY, NULL},
    {"seeing", T_ULONG, offsetof(Beat, seeing), 0, NULL},
    {"resumes", T_INT, offsetof(Beat, resumes), 0, NULL},
    {"tag", T_INT, offsetof(Beat, tag), 0, NULL},
    {"wants_loss", T_BOOL, offsetof(Beat, wants_loss), 0, NULL},
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

/* ---------------------------------------------------------------- the end of a step */

static int may_end_quietly(const Beat *beat)
{
    long step = read_long(beat->step);
    return PyObject_TypeCheck(beat->schedule, ledger_type) && beat->closing == Py_True && beat->due == Py_False && beat->prompt == Py_False &&
           beat->is_followed == Py_False && is_empty(beat->keys) &&
           is_empty(beat->waiting) && is_empty(beat->on_end) &&
           (is_empty(beat->on_seldom) || (step >= FIRST_STEPS && (step + 1) % SELDOM)) &&
           PyList_Size(beat->backlog) + 1 < beat->longest_backlog && read_seconds() < beat->quiet_until;
}

static PyObject *describe_quiet(const Beat *beat, PyObject *phases)
{
    PyObject *rows = beat->no_rows;
    return PyTuple_Pack(8, beat->step, Py_False, phases, PyTuple_GetItem(rows, 0), PyTuple_GetItem(rows, 1),
                        PyTuple_GetItem(rows, 2), beat->scalars, beat->batches);
}

static int begin_next(Beat *beat, PyObject *scalars, PyObject *batches)
{
    set_field(&beat->scalars, scalars);
    set_field(&beat->batches, batches);
    set_field(&beat->losses, PyLong_FromLong(0));
    set_flag(&beat->closing, 0);
    return count_up(&beat->ended) && count_up(&beat->step) && count_up(&beat->serial);
}

static int choose_next(Beat *beat, long step)
{
    PyObject *answer = NULL;
    int due = is_due_at((Ledger *)beat->schedule, step);
    if (due && !(answer = PyObject_CallMethod(beat->schedule, "is_probed", "l", step)))
        return 0;
    set_flag(&beat->due, due);
    set_flag(&beat->probing, answer == Py_True);
    Py_XDECREF(answer);
    return 1;
}

/* -1 with an error set, 0 with nothing done: it is not quiet. */
static int end_quietly(Beat *beat)
{
    Clock *clock = (Clock *)beat->clock;
    double wall = 0.0;
    if (!may_end_quietly(beat))
        return 0;
    PyObject *scalars = PyList_New(0), *batches = PyList_New(0), *phases = clock_split(beat->clock, NULL);
    for (int i = 0; phases && i < clock->phases; i++)
        wall += PyFloat_AsDouble(PyList_GetItem(phases, i));
    int done = scalars && batches && phases && append_owned(beat->backlog, describe_quiet(beat, phases));
    if (done) {
        Ledger *ledger = (Ledger *)beat->schedule;
        long step = read_long(beat->step);
        ledger->thinned++;
        ledger->since_last++;
        pay(ledger, step, PyFloat_AsDouble(PyList_GetItem(phases, clock->own)), wall);
        done = begin_next(beat, Py_NewRef(scalars), Py_NewRef(batches)) && choose_next(beat, step + 1);
    }
    Py_XDECREF(scalars);
    Py_XDECREF(batches);
    Py_XDECREF(phases);
    return done ? 1 : -1;
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

/* The phase before; -1 where it is not a quiet call, and -2 with an error set. */
static int begin_call(Beat *beat, PyObject *module, PyObject *args, PyObject *kwargs, int phase)
{
    Clock *clock = (Clock *)beat->clock;
    if (!has_own_clock(beat) || beat->due != Py_False || !is_first_call(beat) || !is_empty(beat->on_root) ||
        read_long(beat->in_backward))
        return -1;
    int calm = is_calm(beat, module), ended = 0, before = switch_phase(clock, clock->own);
    if (calm > 0 && read_flag(module, str_training) && is_grad_on() && !PyErr_Occurred())
        ended = beat->closing == Py_True ? end_quietly(beat) : 1;
    int quiet = ended > 0 && beat->due == Py_False;
    if (quiet && !append_owned(beat->calls, make_named(beat->call_type, PyTuple_Pack(3, module, args, kwargs))))
        ended = -1;
    switch_phase(clock, quiet ? phase : before);
    if (calm < 0 || ended < 0 || PyErr_Occurred())
        return -2;
    return quiet ? before : -1;
}

/* begin_call(module, args, kwargs, phase). */
static PyObject *beat_begin_call(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!has_count(n, 4))
        return NULL;
    int before = begin_call((Beat *)self, args[0], args[1], args[2], (int)read_long(args[3]));
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
     "end_quietly() -> bool\n\nEnd a step whose optimizer has stepped, if it is a quiet one; return whether it was."},
    {"stay_quiet", beat_stay_quiet, METH_O,
     "stay_quiet(seconds)\n\nLet steps end by the short way for so long: nothing is due but for them."},
    FAST("begin_call", beat_begin_call,
         "begin_call(module, args, kwargs, phase) -> int\n\n"
         "End a quiet step and begin the next one with a call of its model, in a phase; return the phase before. -1 leaves\n"
         "the call to the general way; the step before may have ended."),
    FAST("begin_pass", beat_begin_pass,
         "begin_pass(loss, phase) -> int\n\n"
         "Take the loss, unless it is None, of a step that no probe looks at and begin its backward pass, in a phase; return the phase before. -1, with nothing\n"
         "done, leaves it to the general way."),
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
