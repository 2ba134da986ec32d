/* What the loops of every instruction set share: the task, the running sums of a chunk, rare element types. */

#ifndef CLEW_ELEMENTS_H
#define CLEW_ELEMENTS_H

#include "_layout.h"
#include "_measure.h"

enum { WANT_STATS = 1, WANT_HASH = 2, WANT_HIST = 4 };
enum { DISTRUST = 3 };

/* One tensor to measure. `measured` is the type after subtraction when there are previous values, else the type. */
typedef struct {
    const char *data;
    char *old;            /* previous values, to be overwritten; or NULL */
    const Layout *layout; /* or NULL when the elements lie one after another */
    int64_t count;
    int type, measured, want;
    int has_nan; /* known from a pass before, when this one does not look */
} Task;

/* Sums about one shift, kept open over as many blocks as the shift serves. */
typedef struct {
    float shift;
    int distrust; /* how many stretches go to float64 directly, because one before them had to */
    int64_t n;
    double sum, squares;
} Segment;

/* Tables take turns, so that equal bins in a row do not wait for each other. */
enum { HIST_TABLES = 4 };

typedef struct {
    uint32_t count[HIST_TABLES][BINS + 4];
} HistTables;

/* What is to be fetched while a block is summed, a block later in the tensor and, if it has them, in its previous values;
   for the elements up to `reach`. */
typedef struct {
    const char *first, *second;
    int reach;
} Ahead;

typedef struct {
    Piece *piece;
    Segment segment;
    Ahead ahead;
    HashSums hash[STRETCH / BLOCK];
    int hashes, is_hashed; /* whether the sums of blocks may give those of their hashes as well, and did */
    HistTables tables;
} State;

#if defined(__GNUC__)
typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef double v2d __attribute__((vector_size(16)));
typedef int64_t v2l __attribute__((vector_size(16)));

static inline v4f load_v4f(const float *from)
{
    v4f v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline v2d load_v2d(const double *from)
{
    v2d v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store_vector(void *to, const void *vector)
{
    memcpy(to, vector, 16);
}

static inline v4f pick_v4f(v4i mask, v4f a, v4f b)
{
    return (v4f)((mask & (v4i)a) | (~mask & (v4i)b));
}

static inline v2d pick_v2d(v2l mask, v2d a, v2d b)
{
    return (v2d)((mask & (v2l)a) | (~mask & (v2l)b));
}
#endif

static void close_segment(Segment *s, Piece *p)
{
    if (s->n) {
        double offset = s->sum / (double)s->n, m2 = s->squares - s->sum * offset;
        add_moments(p, s->n, s->shift + offset, m2 > 0.0 ? m2 : 0.0);
    }
    s->n = 0;
    s->sum = s->squares = 0.0;
}

static void move_shift(Segment *s, float shift, Piece *p)
{
    if (s->shift == shift)
        return;
    close_segment(s, p);
    s->shift = shift;
}

/* Whether every number was finite, and squares neither overflowed float32 nor lost digits below its normal range. */
static int is_in_range(const Sums *s)
{
    return s->abs_sum <= FLT_MAX && s->squares <= FLT_MAX && s->squares >= 1e-35;
}

/* Whether the mean is within four deviations of the shift, so that the spread keeps its digits. */
static int is_near_shift(const Sums *s, int n)
{
    return s->sum * s->sum * (17.0 / 16.0) <= n * s->squares;
}

static void add_sums(Segment *segment, const Sums *s, int n, Piece *p)
{
    segment->n += n;
    segment->sum += s->sum;
    segment->squares += s->squares;
    p->abs_sum += s->abs_sum;
    p->min = s->min < p->min ? s->min : p->min;
    p->max = s->max > p->max ? s->max : p->max;
    p->zero += s->zero;
    p->negative += n - s->zero - s->positive;
}

static void start_state(State *state, Piece *p, const Task *task)
{
    state->piece = p;
    state->hashes = task->measured == F32 && task->want & WANT_HASH;
    memset(&state->segment, 0, sizeof state->segment);
    if (task->want & WANT_HIST)
        memset(&state->tables, 0, sizeof state->tables);
}

/* Of n elements from `start` on that lie in memory as they are: what comes a block later, and of an update, of which
   these have been read already, what comes after all of them. */
static void look_ahead(State *state, const Task *task, int64_t start, int n)
{
    int64_t next = start + (task->old ? n : BLOCK), left = task->count - next;
    int is_there = left > 0 && !task->layout && task->type == F32;
    state->ahead.first = is_there ? task->data + next * 4 : NULL;
    state->ahead.second = is_there && task->old ? task->old + next * 4 : NULL;
    state->ahead.reach = !is_there ? 0 : left < STRETCH ? (int)left : STRETCH;
}

static void finish_state(State *state, int want)
{
    close_segment(&state->segment, state->piece);
    for (int j = 0; (want & WANT_HIST) && j < HIST_TABLES; j++)
        for (int i = 0; i < BINS; i++)
            state->piece->hist[i] += state->tables.count[j][i];
}

static int is_float(int type)
{
    return type != F64 && type < I8;
}

static int sample_offset(int64_t group)
{
    return (int)((uint32_t)((uint32_t)group * UINT32_C(2654435761)) >> 29) * HIST_RUN;
}

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float widen_half(uint16_t half)
{
    uint32_t bits = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    if ((half & 0x7C00) == 0x7C00)
        bits |= 0x7F800000u;
    else {
        memcpy(&value, &bits, sizeof value);
        value *= 0x1p112f; /* moves the exponent to its new bias and makes subnormals normal */
        memcpy(&bits, &value, sizeof bits);
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define WIDEN(TYPE)                                                 \
    for (int i = 0; i < n; i++) {                                   \
        TYPE value;                                                 \
        memcpy(&value, raw + i * (int)sizeof value, sizeof value);  \
        to[i] = (double)value;                                      \
    }                                                               \
    break;

static void as_doubles(const char *raw, int type, int n, double *to)
{
    switch (type) {
    case F64:
        memcpy(to, raw, (size_t)n * sizeof *to);
        break;
    case I8:
        WIDEN(int8_t)
    case I16:
        WIDEN(int16_t)
    case I32:
        WIDEN(int32_t)
    case I64:
        WIDEN(int64_t)
    case U8:
        WIDEN(uint8_t)
    case U16:
        WIDEN(uint16_t)
    case U32:
        WIDEN(uint32_t)
    default:
        WIDEN(uint64_t)
    }
}

/* The number is a multiple of 8. */
static void count_bins(const uint8_t *bin, int n, HistTables *tables)
{
    for (int i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++)
            tables->count[j % HIST_TABLES][bin[i + j]]++;
}

static uint8_t find_bin(double x)
{
    uint64_t bits, magnitude;
    memcpy(&bits, &x, sizeof bits);
    magnitude = bits & UINT64_C(0x7FFFFFFFFFFFFFFF);
    int m = (int)(magnitude >> 52) - (1022 + LOW_EXPONENT);
    m = m < 0 ? 0 : m > MAGNITUDES - 1 ? MAGNITUDES - 1 : m;
    m += (int)(bits >> 63) * MAGNITUDES;
    return (uint8_t)(magnitude && magnitude < UINT64_C(0x7FF0000000000000) ? m : NO_BIN);
}

static void count_doubles(const double *x, int n, int64_t start, int sampled, HistTables *tables)
{
    int step = sampled ? HIST_GROUP : n, run = sampled ? HIST_RUN : n;
    for (int i = 0; i < n; i += step) {
        int at = i + (sampled ? sample_offset((start + i) / HIST_GROUP) : 0);
        for (int j = at; j < at + run && j < n; j++)
            tables->count[j % HIST_TABLES][find_bin(x[j])]++;
    }
}

#define UNIFY(TYPE, ABS, LIMIT, ONE)                                   \
    for (int i = 0; i < n; i++) {                                      \
        TYPE bits;                                                     \
        memcpy(&bits, raw + i * (int)sizeof bits, sizeof bits);        \
        bits = (bits & (ABS)) > (LIMIT) ? (ONE) : bits;                \
        memcpy(clean + i * (int)sizeof bits, &bits, sizeof bits);      \
    }                                                                  \
    return clean;

/* A copy of the elements in which all NaNs have the same bits. */
static const char *unify_nans(const char *raw, int type, int n, char *clean)
{
    switch (type) {
    case F32:
        UNIFY(uint32_t, 0x7FFFFFFFu, 0x7F800000u, 0x7FC00000u)
    case F64:
        UNIFY(uint64_t, UINT64_C(0x7FFFFFFFFFFFFFFF), UINT64_C(0x7FF0000000000000), UINT64_C(0x7FF8000000000000))
    case F16:
        UNIFY(uint16_t, 0x7FFF, 0x7C00, 0x7E00)
    case BF16:
        UNIFY(uint16_t, 0x7FFF, 0x7F80, 0x7FC0)
    case E4M3:
        UNIFY(uint8_t, 0x7F, 0x7E, 0x7F)
    case E5M2:
        UNIFY(uint8_t, 0x7F, 0x7C, 0x7F)
    default:
        return raw; /* integers have no NaN, the other 8-bit floats only one */
    }
}

#endif
