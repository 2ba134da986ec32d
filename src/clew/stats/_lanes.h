/* The loops over elements, once per instruction set: the includer defines LANES and F(name).

   A tensor is read in blocks that stay in the first-level cache. Of a block of floats, sums of x - shift are speculated
   in float32, without asking whether a number is finite: a NaN or an infinity, an overflow, an underflow or too much
   cancellation shows in the sums themselves, and only then the block is done again, about its own mean or in float64.
   Sixteen float32 sums run side by side whatever the width of a vector, and nothing is fused, so every
   instruction set gives the same bits. */

#include "_vectors.h"

#define PARTS (16 / LANES)

/* Sum 16 lanes pairwise in double; a fixed order. */
static double F(add_lanes)(const float *lane)
{
    double sum[8];
    for (int i = 0; i < 8; i++)
        sum[i] = (double)lane[i] + (double)lane[i + 8];
    for (int i = 0; i < 4; i++)
        sum[i] += sum[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

static void F(sum_floats)(const float *x, int n, float shift, Sums *out)
{
    float sum[16], squares[16], abs_sum[16], low[16], high[16];
    int32_t zero[16], negative[16];
    VF s1[PARTS], s2[PARTS], sa[PARTS], lo[PARTS], hi[PARTS], k = vf_all(shift);
    VI z[PARTS], neg[PARTS];
    int whole = n & ~15;
    for (int u = 0; u < PARTS; u++) {
        s1[u] = s2[u] = sa[u] = vf_all(0.0f);
        lo[u] = hi[u] = vf_all(x[0]);
        z[u] = neg[u] = vi_zero();
    }
    for (int i = 0; i < whole; i += 16) {
        for (int u = 0; u < PARTS; u++) {
            VF v = vf_load(x + i + u * LANES), d = vf_sub(v, k);
            s1[u] = vf_add(s1[u], d);
            s2[u] = vf_add(s2[u], vf_mul(d, d));
            sa[u] = vf_add(sa[u], vf_abs(v));
            lo[u] = vf_min(lo[u], v);
            hi[u] = vf_max(hi[u], v);
            z[u] = vi_count_zero(z[u], v);
            neg[u] = vi_count_negative(neg[u], v);
        }
    }
    for (int u = 0; u < PARTS; u++) {
        vf_store(sum + u * LANES, s1[u]);
        vf_store(squares + u * LANES, s2[u]);
        vf_store(abs_sum + u * LANES, sa[u]);
        vf_store(low + u * LANES, lo[u]);
        vf_store(high + u * LANES, hi[u]);
        vi_store(zero + u * LANES, z[u]);
        vi_store(negative + u * LANES, neg[u]);
    }
    for (int i = whole; i < n; i++) {
        float v = x[i], d = v - shift;
        int lane = i - whole;
        sum[lane] += d;
        squares[lane] += d * d;
        abs_sum[lane] += fabsf(v);
        low[lane] = v < low[lane] ? v : low[lane];
        high[lane] = v > high[lane] ? v : high[lane];
        zero[lane] += v == 0.0f;
        negative[lane] += v < 0.0f;
    }
    int32_t zeros = 0, negatives = 0;
    for (int i = 0; i < 16; i++) {
        zeros += zero[i];
        negatives += negative[i];
    }
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) {
            low[i] = low[i + half] < low[i] ? low[i + half] : low[i];
            high[i] = high[i + half] > high[i] ? high[i + half] : high[i];
        }
    out->sum = F(add_lanes)(sum);
    out->squares = F(add_lanes)(squares);
    out->abs_sum = F(add_lanes)(abs_sum);
    out->min = low[0];
    out->max = high[0];
    out->zero = zeros;
    out->negative = negatives;
}

/* Numbers in any state, in double, in two passes over the cache: eight sums side by side. */
static void F(add_doubles)(const double *x, int n, Piece *p)
{
    double sum[8] = {0}, abs_sum[8] = {0}, squares[8] = {0}, rest[8] = {0};
    double low = INFINITY, high = -INFINITY;
    int64_t finite = 0, nan = 0, pos_inf = 0, neg_inf = 0, zero = 0, negative = 0;
    for (int i = 0; i < n; i++) {
        double v = x[i];
        int ok = v - v == 0.0;
        double f = ok ? v : 0.0;
        sum[i & 7] += f;
        abs_sum[i & 7] += fabs(f);
        low = ok && v < low ? v : low;
        high = ok && v > high ? v : high;
        finite += ok;
        nan += v != v;
        pos_inf += v == INFINITY;
        neg_inf += v == -INFINITY;
        zero += v == 0.0;
        negative += v < 0.0;
    }
    double total = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    double mean = finite ? total / (double)finite : 0.0;
    for (int i = 0; i < n; i++) {
        double d = x[i] - x[i] == 0.0 ? x[i] - mean : 0.0;
        squares[i & 7] += d * d;
        rest[i & 7] += d;
    }
    double m2 = 0.0, left = 0.0;
    for (int i = 0; i < 8; i++) {
        p->abs_sum += abs_sum[i];
        m2 += squares[i];
        left += rest[i];
    }
    if (finite) {
        double correction = left / (double)finite * left; /* the mean was rounded */
        add_moments(p, finite, mean + left / (double)finite, m2 > correction ? m2 - correction : 0.0);
    }
    p->min = low < p->min ? low : p->min;
    p->max = high > p->max ? high : p->max;
    p->nan += nan;
    p->pos_inf += pos_inf;
    p->neg_inf += neg_inf;
    p->zero += zero;
    p->negative += negative;
}

static void F(add_floats)(const float *x, int n, Segment *segment, Piece *p)
{
    double wide[BLOCK];
    Sums s;
    for (int attempt = 0; attempt < 2; attempt++) {
        F(sum_floats)(x, n, segment->shift, &s);
        if (!(s.abs_sum <= FLT_MAX && s.squares <= FLT_MAX))
            break; /* NaN, infinity, or squares beyond float32 */
        if (s.min == s.max) {
            move_shift(segment, (float)s.min, p); /* equal numbers: no spread, exactly */
            s.sum = s.squares = 0.0;
        } else if (!is_trustworthy(&s, n)) {
            move_shift(segment, (float)(segment->shift + s.sum / n), p);
            continue;
        }
        add_sums(segment, &s, n, p);
        return;
    }
    for (int i = 0; i < n; i++)
        wide[i] = x[i];
    F(add_doubles)(wide, n, p);
}

static void F(widen_halves)(const uint16_t *x, int n, float *to)
{
    int i = 0;
#if LANES >= 8
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
#endif
    for (; i < n; i++)
        to[i] = widen_half(x[i]);
}

/* The elements of a floating type up to 32 bits as float32: in place, or converted into `to`. */
static const float *F(as_floats)(const char *raw, int type, int n, float *to)
{
    if (type == F32)
        return (const float *)(const void *)raw;
    if (type == F16)
        F(widen_halves)((const uint16_t *)(const void *)raw, n, to);
    else if (type == BF16) {
        const uint16_t *x = (const uint16_t *)(const void *)raw;
        uint32_t *bits = (uint32_t *)(void *)to;
        for (int i = 0; i < n; i++)
            bits[i] = (uint32_t)x[i] << 16;
    } else
        for (int i = 0; i < n; i++)
            to[i] = float8_value[type - E4M3][(uint8_t)raw[i]];
    return to;
}

/* Bins of a run of at most 16 floats. Four tables take turns, so that equal bins in a row do not wait for each other. */
static void F(count_floats)(const float *x, int n, HistTables *tables)
{
    int32_t bin[HIST_RUN];
    uint32_t bits[HIST_RUN] = {0};
    memcpy(bits, x, (size_t)n * sizeof *bits);
    for (int i = 0; i < HIST_RUN; i++) {
        uint32_t magnitude = bits[i] & 0x7FFFFFFFu;
        int32_t m = (int32_t)(magnitude >> 23) - (126 + LOW_EXPONENT);
        m = m < 0 ? 0 : m;
        m = m > MAGNITUDES - 1 ? MAGNITUDES - 1 : m;
        m += (int32_t)(bits[i] >> 31) * MAGNITUDES;
        bin[i] = magnitude - 1 < 0x7F7FFFFFu ? m : NO_BIN;
    }
    for (int i = 0; i < HIST_RUN; i += 4)
        for (int j = 0; j < 4; j++)
            tables->count[j][bin[i + j]]++;
}

static uint64_t F(hash_block)(const char *raw, int bytes, int64_t block)
{
    uint64_t products = 0, plain = 0;
    char last[LINE_BYTES] = {0};
    int whole = bytes / LINE_BYTES, lines = whole + (bytes % LINE_BYTES != 0);
    memcpy(last, raw + whole * LINE_BYTES, (size_t)(bytes % LINE_BYTES));
#ifdef VU
    VU b[PARTS], d[PARTS];
    uint64_t lane[2 * 8];
    for (int u = 0; u < PARTS; u++)
        b[u] = d[u] = vu_zero();
    for (int i = 0; i < lines; i++) {
        const char *from = i < whole ? raw + i * LINE_BYTES : last;
        for (int u = 0; u < PARTS; u++) {
            VU w = vu_load(from + u * LANES * 4);
            VU t = vu_add32(w, vu_load(hash_keys + i * 16 + u * LANES));
            b[u] = vu_add64(b[u], vu_multiply(t));
            d[u] = vu_add64(d[u], w);
        }
    }
    for (int u = 0; u < PARTS; u++) {
        vu_store(lane + u * LANES / 2, b[u]);
        vu_store(lane + 8 + u * LANES / 2, d[u]);
    }
    for (int i = 0; i < 8; i++) {
        products += lane[i];
        plain += lane[8 + i];
    }
#else
    for (int i = 0; i < lines; i++) {
        const char *from = i < whole ? raw + i * LINE_BYTES : last;
        for (int j = 0; j < 16; j += 2) {
            uint32_t w[2];
            memcpy(w, from + j * 4, sizeof w);
            const uint32_t *key = hash_keys + i * 16 + j;
            products += (uint64_t)(uint32_t)(w[0] + key[0]) * (uint32_t)(w[1] + key[1]);
            plain += w[0] | (uint64_t)w[1] << 32;
        }
    }
#endif
    products += hash_padding[lines];
    return mix(products + mix(plain + (uint64_t)(block + 1) * GOLDEN));
}

/* The difference to the previous values, in float32 or float64; the previous values become the present ones. */
static const char *F(load_update)(const Task *task, int64_t start, int n, char *to)
{
    float new_floats[BLOCK], old_floats[BLOCK];
    double old_doubles[BLOCK / 2];
    int64_t at = start * type_width[task->type];
    const char *new = task->data + at;
    char *old = task->old + at;
    if (task->measured == F32) {
        const float *a = F(as_floats)(new, task->type, n, new_floats);
        const float *b = F(as_floats)(old, task->type, n, old_floats);
        float *d = (float *)(void *)to;
        for (int i = 0; i < n; i++)
            d[i] = a[i] - b[i];
    } else {
        double *d = (double *)(void *)to;
        as_doubles(new, task->type, n, d);
        as_doubles(old, task->type, n, old_doubles);
        for (int i = 0; i < n; i++)
            d[i] -= old_doubles[i];
    }
    memcpy(old, new, (size_t)n * (size_t)type_width[task->type]);
    return to;
}

/* Statistics and histogram of n elements at `raw`, which start at position `start` of the tensor. */
static void F(add_elements)(const Task *task, const char *raw, int n, int64_t start, State *state)
{
    float floats[BLOCK];
    double doubles[BLOCK];
    if (is_float(task->measured)) {
        const float *x = F(as_floats)(raw, task->measured, n, floats);
        if (task->want & WANT_STATS)
            F(add_floats)(x, n, &state->segment, state->piece);
        if (task->want & WANT_HIST) {
            int step = task->count > HIST_FULL ? HIST_GROUP : HIST_RUN;
            for (int i = 0; i < n; i += step) {
                int at = i + (step == HIST_GROUP ? sample_offset((start + i) / HIST_GROUP) : 0);
                if (at < n)
                    F(count_floats)(x + at, n - at < HIST_RUN ? n - at : HIST_RUN, &state->tables);
            }
        }
        return;
    }
    as_doubles(raw, task->measured, n, doubles);
    if (task->want & WANT_STATS)
        F(add_doubles)(doubles, n, state->piece);
    if (task->want & WANT_HIST)
        count_doubles(doubles, n, start, task->count > HIST_FULL, &state->tables);
}

static void F(run_chunk)(const Task *task, int64_t chunk, Piece *p)
{
    _Alignas(64) char gathered[HASH_BYTES], clean[HASH_BYTES];
    int width = type_width[task->measured], per_block = HASH_BYTES / width;
    int64_t first = chunk * CHUNK_BLOCKS;
    State state;
    start_state(&state, p, task->want);
    for (int64_t block = first; block < first + CHUNK_BLOCKS && block * per_block < task->count; block++) {
        int64_t start = block * per_block, nan = p->nan;
        int n = task->count - start < per_block ? (int)(task->count - start) : per_block;
        const char *raw = task->data + start * width;
        if (task->old)
            raw = F(load_update)(task, start, n, gathered);
        else if (task->layout) {
            gather(task->layout, task->data, start, n, width, gathered);
            raw = gathered;
        }
        if (task->want & (WANT_STATS | WANT_HIST))
            for (int at = 0; at < n; at += BLOCK)
                F(add_elements)(task, raw + at * width, n - at < BLOCK ? n - at : BLOCK, start + at, &state);
        if (task->want & WANT_HASH) {
            if (p->nan != nan || task->has_nan)
                raw = unify_nans(raw, task->measured, n, clean);
            p->hash += F(hash_block)(raw, n * width, block);
        }
    }
    finish_state(&state, task->want);
}

#undef PARTS
