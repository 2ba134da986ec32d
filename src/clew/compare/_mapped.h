/* A stretch of a file, seen through a window that moves along it, and what keeps the process alive when the file is cut.

   A window is mapped, not copied: where the system keeps files in large pages that is twice as fast as reading. It is a
   few megabytes wide, so that hardly any memory counts as this process's own. When a file is cut or its disk fails while
   it is mapped, the system sends SIGBUS; inside a guard that ends the measurement of this thread, and outside of one it
   goes where it would have gone without us. */

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MAP_POPULATE
#define MAP_POPULATE 0
#endif

enum { WINDOW = 4 << 20 };

typedef struct {
    int file;
    int64_t start, end;    /* of the stretch, in the file */
    char *memory;          /* the window, or NULL */
    int64_t low;
    size_t size;
} Window;

static void open_window(Window *w, int64_t start, int64_t size)
{
    w->start = start;
    w->end = start + size;
    w->memory = NULL;
#ifdef POSIX_FADV_SEQUENTIAL
    posix_fadvise(w->file, start, size, POSIX_FADV_SEQUENTIAL);
#endif
}

static void drop_window(Window *w)
{
    if (w->memory)
        munmap(w->memory, w->size);
    w->memory = NULL;
}

/* Map the window that a place of the file lies in; windows begin at multiples of their size, as large pages do. */
static int move_window(Window *w, int64_t at)
{
    drop_window(w);
    w->low = at - at % WINDOW;
    w->size = (size_t)(w->end - w->low < WINDOW ? w->end - w->low : WINDOW);
    void *memory = mmap(NULL, w->size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, w->file, (off_t)w->low);
    w->memory = memory == MAP_FAILED ? NULL : memory;
    return w->memory != NULL;
}

/* Return where a place of the stretch is in memory, and lower `n` to the elements that can be seen from there on. */
static const char *look_at(Window *w, int64_t place, int64_t *n, int width)
{
    int64_t at = w->start + place;
    if ((!w->memory || at < w->low || at >= w->low + (int64_t)w->size) && !move_window(w, at))
        return NULL;
    int64_t seen = (w->low + (int64_t)w->size - at) / width;
    *n = seen < *n ? seen : *n;
    return w->memory + (at - w->low);
}

static int is_short(const Window *w)
{
    struct stat state;
    return !fstat(w->file, &state) && (int64_t)state.st_size < w->end;
}

static _Thread_local struct {
    volatile sig_atomic_t is_on;
    sigjmp_buf place;
} guard;

static struct sigaction before_guard;
static pthread_mutex_t guard_lock = PTHREAD_MUTEX_INITIALIZER;
static int guards;

static void leave(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (guard.is_on)
        siglongjmp(guard.place, 1);
    sigaction(SIGBUS, &before_guard, NULL);
    if (info->si_code <= 0)
        raise(number);    /* sent by somebody: it does not come again by itself */
}

static void begin_guard(void)
{
    pthread_mutex_lock(&guard_lock);
    if (guards++ == 0) {
        struct sigaction ours = {0};
        ours.sa_sigaction = leave;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGBUS, &ours, &before_guard);
    }
    pthread_mutex_unlock(&guard_lock);
}

/* The last one out puts back what was there, unless somebody else has taken the signal meanwhile. */
static void end_guard(void)
{
    struct sigaction now;
    pthread_mutex_lock(&guard_lock);
    if (--guards == 0 && !sigaction(SIGBUS, NULL, &now) && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == leave)
        sigaction(SIGBUS, &before_guard, NULL);
    pthread_mutex_unlock(&guard_lock);
}
