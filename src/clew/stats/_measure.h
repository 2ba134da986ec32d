/* What the kernel adds up: accumulators of a piece of a tensor, how pieces join, how they become a row. */

#ifndef CLEW_MEASURE_H
#define CLEW_MEASURE_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { STATS = 14, BINS = 128, NO_BIN = 128, MAGNITUDES = 64, LOW_EXPONENT = -32 };
enum { HASH_BYTES = 4096, HASH_WORDS = 1024, LINE_BYTES = 64, HASH_LINES = HASH_BYTES / LINE_BYTES };
enum { HIST_FULL = 4096, HIST_GROUP = 128, HIST_RUN = 16 };
enum { BLOCK = 1024, CHUNK_BLOCKS = 32 };
/* So many floats are summed before anything is asked of the sums, and lie in the first-level cache until then. */
enum { STRETCH = 4 * BLOCK, STRETCH_BYTES = 4 * HASH_BYTES };

/* Element types, in the order the Python side numbers them. */
enum { F32, F64, F16, BF16, E4M3, E5M2, E4M3Z, E5M2Z, I8, I16, I32, I64, U8, U16, U32, U64, TYPES };

static const int type_width[TYPES] = {4, 8, 2, 2, 1, 1, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8};

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

static uint32_t hash_keys[HASH_WORDS];
static uint64_t hash_padding[HASH_LINES + 1]; /* [j]: what lines j.. contribute when they are zeros */
static float float8_value[4][256];            /* by type, from E4M3 */

/* Counts and sums of the elements seen so far. m2: sum of squared deviations from the mean, over finite elements. */
typedef struct {
    int64_t finite, nan, pos_inf, neg_inf, zero, negative;
    double mean, m2, abs_sum, min, max;
    uint64_t hash;
    uint32_t hist[BINS];
} Piece;

/* The same for one stretch of finite numbers: sums are of x - shift. */
typedef struct {
    double sum, squares, abs_sum, min, max;
    int64_t zero, positive;
} Sums;

/* What the hash of a block is made of. */
typedef struct {
    uint64_t products, plain;
} HashSums;

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xBF58476D1CE4E5B9);
    x ^= x >> 27;
    x *= UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static void start_piece(Piece *p, int with_hist)
{
    memset(p, 0, with_hist ? sizeof *p : offsetof(Piece, hist));
    p->min = INFINITY;
    p->max = -INFINITY;
}

/* Join n finite numbers with this mean and spread (Chan, Golub and LeVeque's pairwise update). */
static void add_moments(Piece *p, int64_t n, double mean, double m2)
{
    double all = (double)(p->finite + n), delta = mean - p->mean;
    if (!n)
        return;
    if (!p->finite) {
        p->mean = mean;
        p->m2 = m2;
    } else {
        p->m2 += m2 + delta * delta * ((double)p->finite * ((double)n / all));
        p->mean += delta * ((double)n / all);
    }
    p->finite += n;
}

static void add_piece(Piece *p, const Piece *q, int with_hist)
{
    add_moments(p, q->finite, q->mean, q->m2);
    p->nan += q->nan;
    p->pos_inf += q->pos_inf;
    p->neg_inf += q->neg_inf;
    p->zero += q->zero;
    p->negative += q->negative;
    p->abs_sum += q->abs_sum;
    p->min = q->min < p->min ? q->min : p->min;
    p->max = q->max > p->max ? q->max : p->max;
    p->hash += q->hash;
    for (int i = 0; with_hist && i < BINS; i++)
        p->hist[i] += q->hist[i];
}

/* A tensor expanded along dimensions without stride shows each of its elements this many times. */
static void repeat_piece(Piece *p, int64_t times)
{
    p->finite *= times;
    p->nan *= times;
    p->pos_inf *= times;
    p->neg_inf *= times;
    p->zero *= times;
    p->negative *= times;
    p->m2 *= (double)times;
    p->abs_sum *= (double)times;
}

static void write_row(const Piece *p, double *row)
{
    int64_t count = p->finite + p->nan + p->pos_inf + p->neg_inf;
    double n = (double)p->finite;
    row[0] = (double)count;
    row[1] = (double)p->nan;
    row[2] = (double)p->pos_inf;
    row[3] = (double)p->neg_inf;
    row[4] = (double)p->zero;
    row[5] = (double)p->negative;
    row[6] = (double)(count - p->nan - p->zero - p->negative);
    for (int i = 7; i < STATS; i++)
        row[i] = NAN;
    if (!p->finite)
        return;
    row[7] = p->min + 0.0; /* -0 becomes +0: which of two zeros is the least depends on the order of reading */
    row[8] = p->max + 0.0;
    row[9] = p->mean;
    row[10] = sqrt(p->m2 / n);
    row[11] = p->abs_sum / n;
    row[12] = fabs(row[7]) > fabs(row[8]) ? fabs(row[7]) : fabs(row[8]);
    row[13] = sqrt(p->m2 + n * p->mean * p->mean);
}

/* Join another row into a row; the same law as add_moments, on finished statistics. */
static void merge_row(double *a, const double *b)
{
    double na = a[0] - a[1] - a[2] - a[3], nb = b[0] - b[1] - b[2] - b[3], n = na + nb;
    for (int i = 0; i < 7; i++)
        a[i] += b[i];
    if (nb == 0)
        return;
    if (na == 0) {
        memcpy(a + 7, b + 7, 7 * sizeof *a);
        return;
    }
    double fa = na / n, fb = nb / n, delta = b[9] - a[9];
    a[7] = b[7] < a[7] ? b[7] : a[7];
    a[8] = b[8] > a[8] ? b[8] : a[8];
    a[9] += delta * fb;
    a[10] = sqrt(a[10] * a[10] * fa + b[10] * b[10] * fb + delta * delta * fa * fb);
    a[11] = a[11] * fa + b[11] * fb;
    a[12] = b[12] > a[12] ? b[12] : a[12];
    a[13] = hypot(a[13], b[13]);
}

static uint64_t finish_block(HashSums sums, int lines, int64_t block)
{
    return mix(sums.products + hash_padding[lines] + mix(sums.plain + (uint64_t)(block + 1) * GOLDEN));
}

static uint64_t finish_hash(uint64_t total, int64_t count, int width)
{
    return mix(total + mix((uint64_t)count * GOLDEN + (uint64_t)width));
}

static uint64_t chain_hash(uint64_t first, uint64_t second)
{
    return mix(mix(first + GOLDEN) + second);
}

/* The value of an 8-bit float. Finite-only types (fn) have one NaN pattern, "z" types no negative zero and a larger bias. */
static float decode_float8(int type, int bits)
{
    int mantissa_bits = type == E4M3 || type == E4M3Z ? 3 : 2;
    int unsigned_zero = type == E4M3Z || type == E5M2Z;
    int bias = (mantissa_bits == 3 ? 7 : 15) + unsigned_zero;
    int exponent = (bits & 0x7F) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
    float sign = bits & 0x80 ? -1.0f : 1.0f;
    if (unsigned_zero && bits == 0x80)
        return NAN;
    if (type == E4M3 && (bits & 0x7F) == 0x7F)
        return NAN;
    if (type == E5M2 && exponent == 31)
        return mantissa ? NAN : sign * INFINITY;
    if (!exponent)
        return sign * ldexpf((float)mantissa, 1 - bias - mantissa_bits);
    return sign * ldexpf((float)(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

static void fill_tables(void)
{
    for (int i = 0; i < HASH_WORDS; i++)
        hash_keys[i] = (uint32_t)(mix(GOLDEN * (uint64_t)(i + 1)) >> 32);
    for (int line = HASH_LINES - 1; line >= 0; line--) {
        hash_padding[line] = hash_padding[line + 1];
        for (int i = 0; i < LINE_BYTES / 4; i += 2) {
            const uint32_t *key = hash_keys + line * (LINE_BYTES / 4) + i;
            hash_padding[line] += (uint64_t)key[0] * key[1];
        }
    }
    for (int type = E4M3; type <= E5M2Z; type++)
        for (int bits = 0; bits < 256; bits++)
            float8_value[type - E4M3][bits] = decode_float8(type, bits);
}

#endif
