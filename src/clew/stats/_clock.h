/* A stopwatch with one hand per phase: the twin of `StepClock` in capture/clock.py, for the hot paths. */

#ifndef CLEW_CLOCK_H
#define CLEW_CLOCK_H

#if defined(__unix__) || defined(__APPLE__)
#define HAVE_CLOCK 1
#include <time.h>

enum { MAX_PHASES = 16, REST = 0 };

typedef struct {
    PyObject_HEAD
    int phase, phases, own, is_marked;
    double since, times[MAX_PHASES], marked[MAX_PHASES];
} Clock;

static double read_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Charge the time since the last switch to the phase that ends, begin another; return the one before. */
static int switch_phase(Clock *clock, int phase)
{
    double now = read_seconds();
    int before = clock->phase;
    clock->times[before] += now - clock->since;
    clock->since = now;
    clock->phase = phase;
    return before;
}

/* Count time that we cause where no switch can see it as our own. */
static void charge_seconds(Clock *clock, double seconds)
{
    clock->times[clock->own] += seconds;
    clock->times[clock->phase] -= seconds;
}

static PyObject *make_clock(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int phases, own;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "ii", &phases, &own))
        return NULL;
    if (phases < 1 || phases > MAX_PHASES || own < 0 || own >= phases) {
        PyErr_SetString(PyExc_ValueError, "too many phases");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Clock *clock = (Clock *)alloc(type, 0);
    if (clock) {
        clock->phases = phases;
        clock->own = own;
        clock->since = read_seconds();
    }
    return (PyObject *)clock;
}

static PyObject *clock_switch(PyObject *self, PyObject *phase)
{
    Clock *clock = (Clock *)self;
    long to = PyLong_AsLong(phase);
    if (to < 0 || to >= clock->phases) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "no such phase");
        return NULL;
    }
    return PyLong_FromLong(switch_phase(clock, (int)to));
}

static PyObject *clock_charge(PyObject *self, PyObject *seconds)
{
    double value = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred())
        return NULL;
    charge_seconds((Clock *)self, value);
    Py_RETURN_NONE;
}

static void mark_clock(Clock *clock)
{
    switch_phase(clock, clock->phase);
    memcpy(clock->marked, clock->times, sizeof clock->times);
    clock->is_marked = 1;
}

static PyObject *clock_mark(PyObject *self, PyObject *unused)
{
    (void)unused;
    mark_clock((Clock *)self);
    Py_RETURN_NONE;
}

/* The seconds until the mark (or now) by phase; what came after it stays on the hands. */
static PyObject *clock_split(PyObject *self, PyObject *unused)
{
    Clock *clock = (Clock *)self;
    PyObject *ended = PyList_New(clock->phases);
    (void)unused;
    switch_phase(clock, clock->phase);
    for (int i = 0; ended && i < clock->phases; i++) {
        double seconds = clock->is_marked ? clock->marked[i] : clock->times[i];
        PyObject *number = PyFloat_FromDouble(seconds);
        clock->times[i] -= seconds;
        if (!number)
            Py_CLEAR(ended);
        else
            PyList_SetItem(ended, i, number);
    }
    clock->is_marked = 0;
    return ended;
}

static PyObject *clock_restart(PyObject *self, PyObject *unused)
{
    Clock *clock = (Clock *)self;
    (void)unused;
    memset(clock->times, 0, sizeof clock->times);
    clock->is_marked = 0;
    clock->since = read_seconds();
    Py_RETURN_NONE;
}

static PyObject *clock_phase(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((Clock *)self)->phase);
}

static void free_clock(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef clock_methods[] = {
    {"switch", clock_switch, METH_O, "Charge the time since the last switch to the phase that ends; begin another."},
    {"charge", clock_charge, METH_O, "Count time that clew causes where no switch can see it."},
    {"mark", clock_mark, METH_NOARGS, "Remember now as the end of the step, in case it turns out to be."},
    {"split", clock_split, METH_NOARGS, "End the step at the mark (or now) and return its seconds by phase."},
    {"restart", clock_restart, METH_NOARGS, "Forget what was measured and begin again."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef clock_fields[] = {
    {"phase", clock_phase, NULL, "The phase that is going on.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot clock_slots[] = {
    {Py_tp_doc, "Clock(phases, own)\n\nA stopwatch with one hand per phase; one of them is clew's own."},
    {Py_tp_new, make_clock},
    {Py_tp_dealloc, free_clock},
    {Py_tp_methods, clock_methods},
    {Py_tp_getset, clock_fields},
    {0, NULL},
};

static PyType_Spec clock_spec = {
    "clew.stats._kernel.Clock", sizeof(Clock), 0, Py_TPFLAGS_DEFAULT, clock_slots,
};
#endif

#endif
