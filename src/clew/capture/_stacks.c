/* Native stacks of all threads of a process that dies by a fatal signal.

   The handler lies below Python's faulthandler: Python's stacks are written first, then faulthandler puts back what it
   has found, which is this handler, and raises the signal again. When the stacks are written this one does the same:
   the process ends as it would have ended, by the same signal. From the handler on only functions are called that need
   neither memory nor Python. Where the system cannot show its stacks
   (no execinfo.h), the module is empty. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__has_include)
#if __has_include(<execinfo.h>) && (defined(__GLIBC__) || defined(__APPLE__))
#define HAS_STACKS
#endif
#endif

#ifdef HAS_STACKS

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

enum { SIGNALS = 5, MOST_FRAMES = 64, MOST_BETWEEN = 12, MOST_THREADS = 256, STACK_BYTES = 256 * 1024 };
enum { ANSWER_MILLISECONDS = 200, ALL_MILLISECONDS = 3000, WHOLE_SECONDS = 10 };

static const int numbers[SIGNALS] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static struct sigaction before[SIGNALS]; /* what was there when this handler came */
static int is_armed[SIGNALS];
static void (*python_handler)(int);
static int file = -1;
static stack_t narrow; /* the signal stack that was there before the wider one */
static void *wide = NULL;

static atomic_int dying_signal;
static atomic_long dying_thread;

/* ------------------------------------------------------------------ words without stdio */

static void say(const char *text)
{
    size_t left = strlen(text);
    while (left) {
        ssize_t done = write(file, text, left);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return;
        text += done;
        left -= (size_t)done;
    }
}

enum { DIGITS = 24 };

static const char *spell(long number, char *room)
{
    char *at = room + DIGITS;
    *--at = 0;
    do
        *--at = (char)('0' + number % 10);
    while (number /= 10);
    return at;
}

static void say_number(long number)
{
    char room[DIGITS];
    say(spell(number, room));
}

/* Leave out how the signal came here: through this handler, and perhaps through faulthandler's before. The second frame
   is where handlers return to, the same for both. */
static void say_frames(void **frames, int count)
{
    int first = 2;
    for (int i = 2; i < count && i < MOST_BETWEEN; i++)
        if (frames[i] == frames[1])
            first = i + 1;
    if (count > first)
        backtrace_symbols_fd(frames + first, count - first, file);
    if (count == MOST_FRAMES)
        say("(there are more)\n");
}

static long this_thread(void)
{
#ifdef __linux__
    return syscall(SYS_gettid);
#else
    return (long)getpid();
#endif
}

/* ------------------------------------------------------------------ the other threads */

#ifdef __linux__

static void *answer[MOST_FRAMES];
static int answer_count;
static atomic_long asked;   /* the thread that is asked now, 0 when nobody is waited for any more */
static atomic_long answered; /* the thread whose answer is there */

static void write_my_frames(int number)
{
    int kept = errno;
    long me = this_thread(), expected = me;
    (void)number;
    /* One that comes too late finds that nobody waits for it and leaves the array alone. */
    if (atomic_compare_exchange_strong(&asked, &expected, -me)) {
        answer_count = backtrace(answer, MOST_FRAMES);
        atomic_store(&answered, me);
    }
    errno = kept;
}

static long milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int is_answered_in_time(long thread)
{
    const struct timespec moment = {0, 200000};
    for (long until = milliseconds() + ANSWER_MILLISECONDS; milliseconds() < until;) {
        if (atomic_load(&answered) == thread)
            return 1;
        nanosleep(&moment, NULL);
    }
    return 0;
}

static void say_thread(long thread)
{
    char path[64] = "/proc/self/task/", room[DIGITS], name[32];
    ssize_t length = 0;
    strcat(strcat(path, spell(thread, room)), "/comm");
    int comm = open(path, O_RDONLY | O_CLOEXEC);
    if (comm >= 0) {
        length = read(comm, name, sizeof name - 1);
        close(comm);
    }
    name[length > 0 ? length - 1 : 0] = 0;
    say("Native thread ");
    say_number(thread);
    if (*name) {
        say(" (");
        say(name);
        say(")");
    }
}

/* A real-time signal that nobody uses; -1 when all are taken. */
static int take_signal(void)
{
    struct sigaction present, ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = write_my_frames;
    ours.sa_flags = SA_RESTART | SA_ONSTACK;
    for (int number = SIGRTMAX - 2; number > SIGRTMIN; number--)
        if (sigaction(number, NULL, &present) == 0 && present.sa_handler == SIG_DFL)
            return sigaction(number, &ours, NULL) == 0 ? number : -1;
    return -1;
}

static void ask_thread(long thread, int number)
{
    long present = thread;
    atomic_store(&asked, thread);
    if (syscall(SYS_tgkill, getpid(), (int)thread, number) != 0)
        return; /* it has ended */
    /* One that has begun to answer gets a second chance. */
    int is_there = is_answered_in_time(thread) ||
                   (!atomic_compare_exchange_strong(&asked, &present, 0) && is_answered_in_time(thread));
    say("\n");
    say_thread(thread);
    say(":\n");
    if (is_there)
        say_frames(answer, answer_count);
    else
        say("(it did not answer)\n");
}

struct entry { /* of the system call, for which glibc has no name */
    unsigned long long inode;
    long long offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

static int list_threads(long *threads)
{
    static _Alignas(8) char buffer[16384];
    int count = 0, folder = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return 0;
    for (long size; (size = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0;)
        for (long at = 0; at < size;) {
            struct entry *entry = (struct entry *)(buffer + at);
            long thread = 0;
            for (const char *digit = entry->name; *digit >= '0' && *digit <= '9'; digit++)
                thread = thread * 10 + (*digit - '0');
            if (thread > 0 && count < MOST_THREADS)
                threads[count++] = thread;
            at += entry->length;
        }
    close(folder);
    return count;
}

static void ask_others(long me)
{
    static long threads[MOST_THREADS];
    int count = list_threads(threads), number = take_signal();
    long until = milliseconds() + ALL_MILLISECONDS;
    for (int i = 0; i < count && number > 0; i++) {
        if (threads[i] == me)
            continue;
        if (milliseconds() > until) {
            say("\n(the other threads took too long)\n");
            break;
        }
        ask_thread(threads[i], number);
    }
    if (number < 0)
        say("\n(the other threads cannot be asked: all real-time signals are taken)\n");
}

#else

static void say_thread(long thread)
{
    (void)thread;
    say("Native thread");
}

static void ask_others(long me)
{
    (void)me;
    say("\n(the other threads cannot be asked on this system)\n");
}

#endif

/* ------------------------------------------------------------------ the signal */

static int index_of(int number)
{
    for (int i = 0; i < SIGNALS; i++)
        if (numbers[i] == number)
            return i;
    return -1;
}

static void end_plainly(int number)
{
    struct sigaction plain;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    sigaction(number, &plain, NULL);
    raise(number);
}

/* End as the process would have ended without us. */
static void pass_on(int number)
{
    int at = index_of(number);
    if (at >= 0)
        sigaction(number, &before[at], NULL);
    raise(number);
}

/* The stacks take too long, perhaps for ever: without them, then. */
static void give_up(int number)
{
    (void)number;
    pass_on(atomic_load(&dying_signal));
}

static void set_limit(void)
{
    struct sigaction limit;
    sigset_t alarms;
    memset(&limit, 0, sizeof limit);
    limit.sa_handler = give_up;
    limit.sa_flags = SA_ONSTACK;
    sigaction(SIGALRM, &limit, NULL);
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
    alarm(WHOLE_SECONDS);
}

static void write_stacks(int number)
{
    static void *frames[MOST_FRAMES];
    long me = this_thread(), nobody = 0;
    int kept = errno;
    if (file < 0) { /* disarmed, but another handler still passes signals on to this one */
        pass_on(number);
        return;
    }
    if (!atomic_compare_exchange_strong(&dying_thread, &nobody, me)) {
        if (nobody != me) /* another thread dies at the same time, and writes: it ends the process */
            for (int i = 0; i < WHOLE_SECONDS; i++)
                sleep(1);
        end_plainly(number); /* it failed while writing, or handlers pass the signal round in a circle */
        return;
    }
    atomic_store(&dying_signal, number);
    set_limit();
    say("\nNative stacks of process ");
    say_number((long)getpid());
    say(", signal ");
    say_number(number);
    say(":\n\n");
    say_thread(me);
    say(", the one that failed:\n");
    say_frames(frames, backtrace(frames, MOST_FRAMES));
    ask_others(me);
    alarm(0);
    errno = kept;
    pass_on(number);
}

/* ------------------------------------------------------------------ from Python */

/* Signals reach a thread whose stack is full on a stack of its own; unwinding needs more than faulthandler's. */
static void widen(void)
{
    stack_t mine;
    memset(&mine, 0, sizeof mine);
    if (wide != NULL || sigaltstack(NULL, &narrow) != 0 || narrow.ss_size >= STACK_BYTES)
        return;
    void *memory = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return;
    mine.ss_sp = memory;
    mine.ss_size = STACK_BYTES;
    if (sigaltstack(&mine, NULL) == 0)
        wide = memory;
    else
        munmap(memory, STACK_BYTES);
}

static void put_stack_back(void)
{
    stack_t present;
    if (wide == NULL || sigaltstack(NULL, &present) != 0 || present.ss_sp != wide)
        return; /* another thread's, or replaced: the memory stays, for it may be in use */
    if (sigaltstack(&narrow, NULL) == 0) {
        munmap(wide, STACK_BYTES);
        wide = NULL;
    }
}

static int is_known(const struct sigaction *action)
{
    return action->sa_handler == SIG_DFL || action->sa_handler == write_stacks ||
           (python_handler != NULL && action->sa_handler == python_handler);
}

/* Call a function of faulthandler's, and put back what it has done to handlers of the script's own. */
static PyObject *call_around(PyObject *function)
{
    struct sigaction present[SIGNALS];
    for (int i = 0; i < SIGNALS; i++)
        sigaction(numbers[i], NULL, &present[i]);
    PyObject *result = PyObject_CallObject(function, NULL);
    for (int i = 0; i < SIGNALS; i++)
        if (!is_known(&present[i]))
            sigaction(numbers[i], &present[i], NULL);
    return result;
}

/* Whose handler it is: "" for the system's, "ours", "python", or the file it comes from. */
static const char *owner_of(const struct sigaction *action)
{
    Dl_info python, other;
    if (action->sa_handler == SIG_DFL)
        return "";
    if (action->sa_handler == write_stacks)
        return "ours";
    if (action->sa_handler == SIG_IGN || !dladdr((void *)action->sa_handler, &other) || !other.dli_fname)
        return "unknown";
    if (dladdr((void *)PyErr_Occurred, &python) && python.dli_fbase == other.dli_fbase)
        return "python";
    return other.dli_fname;
}

static PyObject *owner(PyObject *module, PyObject *args)
{
    struct sigaction present;
    int number;
    (void)module;
    if (!PyArg_ParseTuple(args, "i", &number))
        return NULL;
    return PyUnicode_DecodeFSDefault(sigaction(number, NULL, &present) == 0 ? owner_of(&present) : "unknown");
}

static PyObject *arm(PyObject *module, PyObject *args)
{
    void *warm[4];
    struct sigaction ours;
    int number, descriptor;
    (void)module;
    if (!PyArg_ParseTuple(args, "ii", &number, &descriptor))
        return NULL;
    int at = index_of(number);
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = write_stacks;
    ours.sa_flags = SA_NODEFER | SA_ONSTACK;
    backtrace(warm, 4); /* the first call loads a library */
    file = descriptor;
    if (at >= 0 && !is_armed[at])
        is_armed[at] = sigaction(number, &ours, &before[at]) == 0;
    Py_RETURN_NONE;
}

static PyObject *enable(PyObject *module, PyObject *function)
{
    struct sigaction present;
    (void)module;
    PyObject *result = call_around(function);
    for (int i = 0; i < SIGNALS; i++)
        if (is_armed[i] && sigaction(numbers[i], NULL, &present) == 0 && present.sa_handler != write_stacks)
            python_handler = present.sa_handler;
    widen();
    return result;
}

static PyObject *disable(PyObject *module, PyObject *function)
{
    (void)module;
    put_stack_back();
    return call_around(function);
}

static PyObject *disarm(PyObject *module, PyObject *nothing)
{
    struct sigaction present;
    (void)module;
    (void)nothing;
    put_stack_back();
    for (int i = 0; i < SIGNALS; i++) {
        if (is_armed[i] && sigaction(numbers[i], NULL, &present) == 0 && present.sa_handler == write_stacks)
            sigaction(numbers[i], &before[i], NULL);
        is_armed[i] = 0;
    }
    file = -1;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"owner", owner, METH_VARARGS,
     "owner(signal)\n\nReturn whose the handler is: '' the system's, 'ours', 'python', or the file it comes from."},
    {"arm", arm, METH_VARARGS,
     "arm(signal, descriptor)\n\nHave a fatal signal write native stacks before what happens now."},
    {"enable", enable, METH_O,
     "enable(function)\n\nCall what switches faulthandler on, without taking handlers of the script's away."},
    {"disable", disable, METH_O,
     "disable(function)\n\nCall what switches faulthandler off, without taking handlers of the script's away."},
    {"disarm", disarm, METH_NOARGS, "disarm()\n\nPut back what was there, where it was not replaced meanwhile."},
    {NULL, NULL, 0, NULL},
};

#else

static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};

#endif

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_stacks", "Native stacks of a process that dies by a signal.", 0, methods, NULL, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__stacks(void)
{
    return PyModule_Create(&definition);
}
