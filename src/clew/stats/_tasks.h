/* Running tasks: which instruction set, how many threads, in what order the pieces join. */

#ifndef CLEW_TASKS_H
#define CLEW_TASKS_H

#include <stdlib.h>

#include "_elements.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#endif

#if defined(__GNUC__)
#define APART __attribute__((noinline))
#define INLINED inline __attribute__((always_inline))
#define FETCH(address) __builtin_prefetch(address)
#else
#define APART
#define INLINED inline
#define FETCH(address) (void)(address)
#endif

#define F_JOIN(name, suffix) name##_##suffix
#define F_NAME(name, suffix) F_JOIN(name, suffix)
#define F(name) F_NAME(name, VARIANT)

#define VARIANT plain
#define LANES 1
#include "_lanes.h"
#undef VARIANT
#undef LANES

#if defined(__GNUC__)
#define VARIANT portable
#define LANES 4
#define PORTABLE
#include "_lanes.h"
#undef VARIANT
#undef LANES
#undef PORTABLE
#endif

#ifdef HAVE_X86
#define VARIANT baseline
#define LANES 4
#include "_lanes.h"
#undef VARIANT
#undef LANES

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define VARIANT avx2
#define LANES 8
#include "_lanes.h"
#undef VARIANT
#undef LANES
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,popcnt,prefer-vector-width=512")
#endif
#define VARIANT avx512
#define LANES 16
#include "_lanes.h"
#undef VARIANT
#undef LANES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

typedef void (*RunChunk)(const Task *, int64_t, Piece *);

typedef struct {
    const char *name;
    RunChunk run;
} Variant;

static const Variant variants[] = {
    {"plain", run_chunk_plain},
#if defined(__GNUC__)
    {"portable", run_chunk_portable},
#endif
#ifdef HAVE_X86
    {"baseline", run_chunk_baseline},
    {"avx2", run_chunk_avx2},
    {"avx512", run_chunk_avx512},
#endif
};

enum { VARIANTS = sizeof variants / sizeof *variants };

static const Variant *variant = variants;

static int is_runnable(const Variant *v)
{
#ifdef HAVE_X86
    if (v->run == run_chunk_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (v->run == run_chunk_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && is_runnable(v - 1);
#endif
    (void)v;
    return 1;
}

/* Users may have asked for subnormals to be flushed to zero; the kernel must see them. The setting is put back. */
static uint64_t enter_arithmetic(void)
{
    uint64_t before = 0;
#if defined(HAVE_X86)
    before = _mm_getcsr();
    _mm_setcsr(0x1F80);
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0)));
#endif
    return before;
}

static void leave_arithmetic(uint64_t before)
{
#if defined(HAVE_X86)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

static int64_t count_chunks(const Task *task)
{
    int64_t per_chunk = CHUNK_BLOCKS * (HASH_BYTES / type_width[task->measured]);
    return (task->count + per_chunk - 1) / per_chunk;
}

static void run_serially(const Task *task, Piece *total)
{
    int with_hist = task->want & WANT_HIST;
    int64_t chunks = count_chunks(task);
    start_piece(total, with_hist);
    if (chunks == 1) {
        variant->run(task, 0, total);
        return;
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        Piece piece;
        start_piece(&piece, with_hist);
        variant->run(task, chunk, &piece);
        add_piece(total, &piece, with_hist);
    }
}

#if defined(__GNUC__)
/* Threads are borrowed from the OpenMP runtime that torch already runs: no threads of our own, none to contend with. */
typedef void (*GompParallel)(void (*)(void *), void *, unsigned, unsigned);

static GompParallel gomp_parallel;

typedef struct {
    const Task *task;
    int64_t chunk;
} Unit;

typedef struct {
    const Unit *units;
    Piece *pieces;
    int64_t count, next;
} Job;

static void work(void *argument)
{
    Job *job = argument;
    uint64_t before = enter_arithmetic();
    for (;;) {
        int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->count)
            break;
        start_piece(&job->pieces[i], job->units[i].task->want & WANT_HIST);
        variant->run(job->units[i].task, job->units[i].chunk, &job->pieces[i]);
    }
    leave_arithmetic(before);
}

/* Pieces are cut the same way and joined in the same order as without threads. */
static int run_in_parallel(const Task *tasks, int64_t n, Piece *totals, int threads)
{
    Job job = {0};
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++)
        job.count += count_chunks(&tasks[i]);
    Unit *units = malloc((size_t)job.count * sizeof *units);
    job.pieces = malloc((size_t)job.count * sizeof *job.pieces);
    job.units = units;
    if (!units || !job.pieces) {
        free(units);
        free(job.pieces);
        return 0;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t chunk = 0; chunk < count_chunks(&tasks[i]); chunk++)
            units[at++] = (Unit){&tasks[i], chunk};
    gomp_parallel(work, &job, (unsigned)threads, 0);
    for (int64_t i = at = 0; i < n; i++) {
        start_piece(&totals[i], tasks[i].want & WANT_HIST);
        for (; at < job.count && units[at].task == &tasks[i]; at++)
            add_piece(&totals[i], &job.pieces[at], tasks[i].want & WANT_HIST);
    }
    free(units);
    free(job.pieces);
    return 1;
}
#endif

static void run_tasks(const Task *tasks, int64_t n, Piece *totals, int threads)
{
    uint64_t before = enter_arithmetic();
#if defined(__GNUC__)
    if (threads > 1 && run_in_parallel(tasks, n, totals, threads)) {
        leave_arithmetic(before);
        return;
    }
#else
    (void)threads;
#endif
    for (int64_t i = 0; i < n; i++)
        run_serially(&tasks[i], &totals[i]);
    leave_arithmetic(before);
}

#endif
