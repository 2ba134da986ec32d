/* A last word before a signal ends the process that nobody handles: SIGTERM of a scheduler, of `docker stop`, `timeout`.

   The process ends as it would have ended, by the same signal, a moment later. In that moment a function of Python's is
   called, at the next place where Python lets signals in: the main thread executes no further line of the script. Should
   it wait for something outside Python, another thread calls the function. Should nobody get to it in time, because the
   interpreter itself hangs, the process ends without. The handler lies below Python's own: `signal.getsignal` says what
   it said, a handler that the script sets later replaces it, and a forked process ends at once. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef _WIN32

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST_SIGNALS = 16, MAIN_MILLISECONDS = 200, WHOLE_MILLISECONDS = 6000 };

static int numbers[MOST_SIGNALS];
static int count;
static pid_t process;
static PyObject *last_word;
static pthread_t keeper;
static int wake[2] = {-1, -1}; /* to the thread that keeps the time */
static atomic_int ending;      /* the signal that ends the process */
static atomic_int is_taken;    /* somebody is at the last word */

static void end_plainly(int number)
{
    struct sigaction plain;
    sigset_t only;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    sigaction(number, &plain, NULL);
    sigemptyset(&only);
    sigaddset(&only, number);
    pthread_sigmask(SIG_UNBLOCK, &only, NULL);
    raise(number);
}

/* With the interpreter's lock held: say the last word and end. */
static int say_last_word(void *nothing)
{
    int free = 0;
    (void)nothing;
    if (!atomic_load(&ending) || getpid() != process)
        return 0;
    if (atomic_compare_exchange_strong(&is_taken, &free, 1)) {
        PyObject *result = PyObject_CallFunction(last_word, "i", atomic_load(&ending));
        Py_XDECREF(result);
        PyErr_Clear();
        end_plainly(atomic_load(&ending));
    }
    Py_BEGIN_ALLOW_THREADS
    for (;;)
        sleep(1); /* another thread is at it, and the process ends with that */
    Py_END_ALLOW_THREADS
    return 0;
}

/* Python is asked from here, in the main thread, or it would not look before its threads change turns. Its list of calls
   has a lock: should the signal come while the main thread holds that one, the time runs out. */
static void hear(int number)
{
    int kept = errno, nobody = 0;
    if (getpid() != process)
        end_plainly(number); /* a forked copy: the record is none of its business */
    else if (atomic_compare_exchange_strong(&ending, &nobody, number) && write(wake[1], "!", 1) == 1)
        Py_AddPendingCall(say_last_word, NULL);
    errno = kept;
}

static void *stand_in(void *nothing)
{
    (void)nothing;
    if (!atomic_load(&is_taken)) {
        PyGILState_STATE state = PyGILState_Ensure();
        say_last_word(NULL);
        PyGILState_Release(state);
    }
    return NULL;
}

static void wait_milliseconds(long milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static void *keep_time(void *nothing)
{
    char byte;
    ssize_t done;
    pthread_t other;
    (void)nothing;
    do
        done = read(wake[0], &byte, 1);
    while (done < 0 && errno == EINTR);
    if (!atomic_load(&ending))
        return NULL; /* nothing is to be saved any more */
    wait_milliseconds(MAIN_MILLISECONDS);
    if (!atomic_load(&is_taken) && pthread_create(&other, NULL, stand_in, NULL) == 0)
        pthread_detach(other);
    wait_milliseconds(WHOLE_MILLISECONDS);
    end_plainly(atomic_load(&ending));
    return NULL;
}

static void close_pipe(void)
{
    for (int i = 0; i < 2; i++) {
        if (wake[i] >= 0)
            close(wake[i]);
        wake[i] = -1;
    }
}

static int open_pipe(void)
{
    close_pipe(); /* those of the process that this one was forked from */
    if (pipe(wake) != 0)
        return -1;
    for (int i = 0; i < 2; i++)
        fcntl(wake[i], F_SETFD, FD_CLOEXEC);
    return 0;
}

/* The thread hears no signals: they are for those of the script. */
static int start_keeper(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failure = pthread_create(&keeper, NULL, keep_time, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

static void take_signal(int number)
{
    struct sigaction present, ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = hear;
    ours.sa_flags = SA_RESTART | SA_ONSTACK;
    if (count >= MOST_SIGNALS || sigaction(number, NULL, &present) != 0)
        return;
    int is_free = present.sa_handler == SIG_DFL || present.sa_handler == hear; /* inherited by a fork */
    if (is_free && sigaction(number, &ours, NULL) == 0)
        numbers[count++] = number;
}

static PyObject *arm(PyObject *module, PyObject *args)
{
    PyObject *function, *wanted;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &function, &wanted))
        return NULL;
    if (process == getpid() || open_pipe() != 0)
        Py_RETURN_FALSE;
    atomic_store(&ending, 0);
    atomic_store(&is_taken, 0);
    process = getpid();
    if (start_keeper() != 0) {
        close_pipe();
        process = 0;
        Py_RETURN_FALSE;
    }
    Py_XDECREF(last_word);
    last_word = Py_NewRef(function);
    count = 0;
    for (Py_ssize_t i = 0; i < PySequence_Size(wanted); i++) {
        PyObject *each = PySequence_GetItem(wanted, i);
        if (each != NULL)
            take_signal((int)PyLong_AsLong(each));
        Py_XDECREF(each);
    }
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *disarm(PyObject *module, PyObject *nothing)
{
    struct sigaction present;
    ssize_t done;
    (void)module;
    (void)nothing;
    if (process != getpid())
        Py_RETURN_NONE;
    for (int i = 0; i < count; i++)
        if (sigaction(numbers[i], NULL, &present) == 0 && present.sa_handler == hear) {
            present.sa_handler = SIG_DFL;
            sigaction(numbers[i], &present, NULL);
        }
    count = 0;
    done = write(wake[1], ".", 1);
    if (done == 1 && !atomic_load(&ending)) {
        Py_BEGIN_ALLOW_THREADS
        pthread_join(keeper, NULL);
        Py_END_ALLOW_THREADS
        close_pipe();
        process = 0;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"arm", arm, METH_VARARGS,
     "arm(function, signals)\n\nHave signals that nobody handles call a function, with their number, before they end the "
     "process; return whether that can be done."},
    {"disarm", disarm, METH_NOARGS, "disarm()\n\nPut back what was there, where it was not replaced meanwhile."},
    {NULL, NULL, 0, NULL},
};

#else

static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};

#endif

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_ending", "A last word before a signal ends the process.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__ending(void)
{
    return PyModule_Create(&definition);
}
