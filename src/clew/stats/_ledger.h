/* What the steps of a recording may cost, and which of them are recorded; the twins are in capture/beat.py.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK
#include <structmember.h>

enum { LONGEST_GAP = 1000, PROBE_EVERY = 25, PROBE_SHARE = 20, PROBE_RARELY = 200 };

#define MEMORY 0.9     /* weight of the past in the running mean of the cost */
#define BANK_STEPS 2.0 /* what may be saved up, in recorded steps */

typedef struct {
    PyObject_HEAD
    double share, bank, most, cost, unseen;
    long period, warmup_steps, forced_until, found_until, recorded, probed_at, thinned, since_last;
} Ledger;

static PyTypeObject *ledger_type;

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

/* A finished step took so long in all, and so much of that was clew. */
static void account(Ledger *ledger, long step, double cost, double wall, int was_due)
{
    if (was_due) {
        double keep = ledger->cost != 0.0 ? MEMORY : 0.0;
        ledger->recorded++;
        ledger->since_last = 0;
        ledger->cost = keep * ledger->cost + (1 - keep) * cost;
        ledger->most = BANK_STEPS * ledger->cost;
    } else {
        ledger->thinned++;
        ledger->since_last++;
    }
    pay(ledger, step, cost, wall);
}

/* Whether the rules get a closer look at a step that is due; asked once for each. */
static int is_probed_at(Ledger *ledger, long step)
{
    if (step < ledger->warmup_steps || step <= ledger->found_until)
        return 1;
    long gap = ledger->recorded / PROBE_SHARE;
    gap = gap < PROBE_EVERY ? PROBE_EVERY : gap > PROBE_RARELY ? PROBE_RARELY : gap;
    if (ledger->recorded - ledger->probed_at < gap)
        return 0;
    ledger->probed_at = ledger->recorded;
    return 1;
}

static PyObject *ledger_account(PyObject *self, PyObject *args)
{
    long step;
    double cost, wall;
    int was_due;
    if (!PyArg_ParseTuple(args, "lddp", &step, &cost, &wall, &was_due))
        return NULL;
    account((Ledger *)self, step, cost, wall, was_due);
    Py_RETURN_NONE;
}

static PyObject *ledger_is_probed(PyObject *self, PyObject *step)
{
    long number = PyLong_AsLong(step);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(is_probed_at((Ledger *)self, number));
}

static PyObject *ledger_is_due(PyObject *self, PyObject *step)
{
    long number = PyLong_AsLong(step);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(is_due_at((Ledger *)self, number));
}

static PyMethodDef ledger_methods[] = {
    {"account", ledger_account, METH_VARARGS,
     "account(step, cost_seconds, wall_seconds, was_due)\n\n"
     "Take note of what a finished step took in all, and how much of that was clew."},
    {"is_probed", ledger_is_probed, METH_O,
     "is_probed(step) -> bool\n\n"
     "Return whether the rules get a closer look at this step, which costs more than its statistics."},
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
    {"found_until", T_LONG, offsetof(Ledger, found_until), 0, NULL},
    {"recorded", T_LONG, offsetof(Ledger, recorded), 0, NULL},
    {"probed_at", T_LONG, offsetof(Ledger, probed_at), 0, NULL},
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
#endif
