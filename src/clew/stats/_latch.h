/* A lock that its holder may take again: what `threading.RLock` is, taken and given back by C without a call through
   Python. Each row of a step takes it.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK
#include <pythread.h>

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner;
    long depth;
} Latch;

static PyTypeObject *latch_type;

static PyObject *make_latch(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    Latch *latch = allocate(type);
    if (latch && !(latch->lock = PyThread_allocate_lock())) {
        Py_DECREF(latch);
        return PyErr_NoMemory();
    }
    return (PyObject *)latch;
}

static void free_latch(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Latch *latch = (Latch *)self;
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    if (latch->lock && latch->depth)
        PyThread_release_lock(latch->lock);
    if (latch->lock)
        PyThread_free_lock(latch->lock);
    release(self);
    Py_DECREF(type);
}

/* Whether it was taken; negative microseconds wait for as long as it takes. Others run meanwhile. */
static int take_latch(Latch *latch, long long microseconds)
{
    unsigned long me = PyThread_get_thread_ident();
    if (latch->depth && latch->owner == me) {
        latch->depth++;
        return 1;
    }
    if (!PyThread_acquire_lock(latch->lock, NOWAIT_LOCK)) {
        PyLockStatus status;
        if (microseconds == 0)
            return 0;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(latch->lock, microseconds, 0);
        Py_END_ALLOW_THREADS
        if (status != PY_LOCK_ACQUIRED)
            return 0;
    }
    latch->owner = me;
    latch->depth = 1;
    return 1;
}

static void give_latch(Latch *latch)
{
    if (--latch->depth)
        return;
    latch->owner = 0;
    PyThread_release_lock(latch->lock);
}

static PyObject *latch_acquire(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1;
    double timeout = -1.0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pd", names, &blocking, &timeout))
        return NULL;
    return PyBool_FromLong(take_latch((Latch *)self, !blocking ? 0 : timeout < 0.0 ? -1 : (long long)(timeout * 1e6)));
}

static PyObject *latch_release(PyObject *self, PyObject *unused)
{
    Latch *latch = (Latch *)self;
    (void)unused;
    if (!latch->depth || latch->owner != PyThread_get_thread_ident())
        return PyErr_Format(PyExc_RuntimeError, "cannot release a lock that this thread does not hold");
    give_latch(latch);
    Py_RETURN_NONE;
}

static PyObject *latch_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(take_latch((Latch *)self, -1));
}

static PyObject *latch_exit(PyObject *self, PyObject *args)
{
    (void)args;
    return latch_release(self, NULL);
}

static PyMethodDef latch_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))latch_acquire, METH_VARARGS | METH_KEYWORDS,
     "acquire(blocking=True, timeout=-1) -> bool\n\nTake it; its holder may do so again. Return whether it was taken."},
    {"release", latch_release, METH_NOARGS, "release()\n\nGive it back, as often as it was taken."},
    {"__enter__", latch_enter, METH_NOARGS, "Take it."},
    {"__exit__", latch_exit, METH_VARARGS, "Give it back."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot latch_slots[] = {
    {Py_tp_doc, "Latch()\n\nA lock that its holder may take again, as threading.RLock is."},
    {Py_tp_new, make_latch},
    {Py_tp_dealloc, free_latch},
    {Py_tp_methods, latch_methods},
    {0, NULL},
};

static PyType_Spec latch_spec = {"clew.stats._kernel.Latch", sizeof(Latch), 0, Py_TPFLAGS_DEFAULT, latch_slots};
#endif
