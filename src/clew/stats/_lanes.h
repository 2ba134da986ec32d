/* The loops over elements, once per instruction set: the includer defines LANES and F(name).

   A tensor is read in blocks that stay in the first-level cache. Of a block of floats, sums of x - shift are speculated
   in float32, without asking whether a number is finite: a NaN or an infinity, an overflow, an underflow or too much
   cancellation shows in the sums themselves, and only then the block is done again, about its own mean or in float64.
   Sixteen float32 sums run side by side whatever the width of a vector, and nothing is fused, so every
   instruction set gives the same bits. */

#include "_vectors.h"

#define PARTS (16 / LANES)
#define WIDE_LANES ((LANES + 1) / 2)
#define WIDE_PARTS (8 / WIDE_LANES)

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

#if LANES == 16
/* The same sum in the same order, without a way through memory. */
static double F(add_parts)(const __m512 *part)
{
    __m512d eight = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(part[0])),
                                  _mm512_cvtps_pd(_mm512_extractf32x8_ps(part[0], 1)));
    __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

#define vf_least(v) _mm512_reduce_min_ps(v)
#define vf_greatest(v) _mm512_reduce_max_ps(v)
#define vi_sum(v) (v)
#elif LANES == 8
static double F(add_parts)(const __m256 *part)
{
    __m256d low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(part[0])),
                                _mm256_cvtps_pd(_mm256_castps256_ps128(part[1])));
    __m256d high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(part[0], 1)),
                                 _mm256_cvtps_pd(_mm256_extractf128_ps(part[1], 1)));
    __m256d four = _mm256_add_pd(low, high);
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

static float F(find_least)(__m256 v)
{
    __m128 four = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}

static float F(find_greatest)(__m256 v)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static int32_t F(add_counts)(__m256i v)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

static uint64_t F(sum_words)(__m256i v)
{
    __m128i two = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
}

#define vf_least(v) F(find_least)(v)
#define vf_greatest(v) F(find_greatest)(v)
#define vi_sum(v) F(add_counts)(v)
#endif

/* Sums of n floats and, of a whole block whose hash is asked for, the sums of that; `hash` is known when compiling. What
   comes after the block is fetched meanwhile: the processor by itself does not look beyond a page. */
static INLINED void F(sum_lines)(const float *x, int n, float shift, const Ahead *ahead, Sums *out, HashSums *hash)
{
    float sum[16], squares[16], abs_sum[16], low[LANES], high[LANES];
    int32_t zero[LANES], positive[LANES];
    VF s1[PARTS], s2[PARTS], sa[PARTS], k = vf_all(shift), lo = vf_all(x[0]), hi = lo;
    VI z = vi_zero(), pos = vi_zero();
#ifdef VU
    VU products = vu_zero(), plain = vu_zero();
#endif
    const char *first = ahead->first, *second = ahead->second;
    int whole = n & ~15;
    for (int u = 0; u < PARTS; u++)
        s1[u] = s2[u] = sa[u] = vf_all(0.0f);
    for (int i = 0; i < whole; i += 16) {
        FETCH(first + i * 4);
        FETCH(second + i * 4);
        for (int u = 0; u < PARTS; u++) {
            VF v = vf_load(x + i + u * LANES), d = vf_sub(v, k);
            s1[u] = vf_add(s1[u], d);
            s2[u] = vf_add(s2[u], vf_mul(d, d));
            sa[u] = vf_add(sa[u], vf_abs(v));
            lo = vf_min(lo, v);
            hi = vf_max(hi, v);
            vi_count(z, pos, v);
#ifdef VU
            if (hash) {
                VU w = vu_bits(v), t = vu_add32(w, vu_load(hash_keys + i + u * LANES));
                products = vu_add64(products, vu_multiply(t));
                plain = vu_add64(plain, w);
                vu_stay(z, products, plain);
            }
#endif
        }
    }
    vi_split(z, pos);
#ifdef VU
    if (hash)
        *hash = (HashSums){vu_sum(products), vu_sum(plain)};
#else
    (void)hash;
#endif
#if LANES >= 8
    if (whole == n) {
        *out = (Sums){F(add_parts)(s1), F(add_parts)(s2), F(add_parts)(sa), vf_least(lo),
                      vf_greatest(hi),  vi_sum(z),        vi_sum(pos)};
        return;
    }
#endif
    for (int u = 0; u < PARTS; u++) {
        vf_store(sum + u * LANES, s1[u]);
        vf_store(squares + u * LANES, s2[u]);
        vf_store(abs_sum + u * LANES, sa[u]);
    }
    vf_store(low, lo);
    vf_store(high, hi);
    vi_store(zero, z);
    vi_store(positive, pos);
    for (int i = whole; i < n; i++) {
        float v = x[i], d = v - shift;
        sum[i - whole] += d;
        squares[i - whole] += d * d;
        abs_sum[i - whole] += fabsf(v);
        low[0] = v < low[0] ? v : low[0];
        high[0] = v > high[0] ? v : high[0];
        zero[0] += v == 0.0f;
        positive[0] += v > 0.0f;
    }
    for (int i = 1; i < LANES; i++) {
        low[0] = low[i] < low[0] ? low[i] : low[0];
        high[0] = high[i] > high[0] ? high[i] : high[0];
        zero[0] += zero[i];
        positive[0] += positive[i];
    }
    out->sum = F(add_lanes)(sum);
    out->squares = F(add_lanes)(squares);
    out->abs_sum = F(add_lanes)(abs_sum);
    out->min = low[0];
    out->max = high[0];
    out->zero = zero[0];
    out->positive = positive[0];
}

/* Apart from their callers, so that their loops have all registers to themselves. */
static APART void F(sum_floats)(const float *x, int n, float shift, const Ahead *ahead, Sums *out)
{
    F(sum_lines)(x, n, shift, ahead, out, NULL);
}

#ifdef VU
static APART void F(sum_and_hash)(const float *x, float shift, const Ahead *ahead, Sums *out, HashSums *hash)
{
    F(sum_lines)(x, BLOCK, shift, ahead, out, hash);
}
#endif

static double F(add_double_lanes)(const double *lane)
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* Squared deviations from the mean of the finite numbers among n, and what the rounding of the mean left over. */
static void F(add_spread)(const double *x, int n, int64_t finite, double mean, Piece *p)
{
    double squares[8], rest[8];
    VD s1[WIDE_PARTS], s2[WIDE_PARTS], m = vd_all(mean), none = vd_all(0.0);
    for (int u = 0; u < WIDE_PARTS; u++)
        s1[u] = s2[u] = none;
    for (int i = 0; i < n; i += 8) {
        for (int u = 0; u < WIDE_PARTS; u++) {
            VD v = vd_load(x + i + u * WIDE_LANES);
            VD d = vd_pick(vm_finite(v), vd_sub(v, m), none);
            s1[u] = vd_add(s1[u], d);
            s2[u] = vd_add(s2[u], vd_mul(d, d));
        }
    }
    for (int u = 0; u < WIDE_PARTS; u++) {
        vd_store(rest + u * WIDE_LANES, s1[u]);
        vd_store(squares + u * WIDE_LANES, s2[u]);
    }
    double left = F(add_double_lanes)(rest), offset = left / (double)finite;
    double m2 = F(add_double_lanes)(squares) - left * offset;
    add_moments(p, finite, mean + offset, m2 > 0.0 ? m2 : 0.0);
}

/* Numbers in any state, in double, in two passes over the cache. There is room for 7 numbers after the last. */
static void F(add_doubles)(double *x, int n, Piece *p)
{
    double sum[8], abs_sum[8], low[WIDE_LANES], high[WIDE_LANES];
    int64_t finite[WIDE_LANES], nan[WIDE_LANES], pos_inf[WIDE_LANES], zero[WIDE_LANES], negative[WIDE_LANES];
    VD s[WIDE_PARTS], sa[WIDE_PARTS], lo = vd_all(INFINITY), hi = vd_all(-INFINITY), none = vd_all(0.0);
    VL f = vl_zero(), nans = f, inf = f, z = f, neg = f;
    int padded = (n + 7) & ~7;
    for (int i = n; i < padded; i++)
        x[i] = NAN; /* in no sum; taken from the count of NaNs again */
    for (int u = 0; u < WIDE_PARTS; u++)
        s[u] = sa[u] = none;
    for (int i = 0; i < padded; i += 8) {
        for (int u = 0; u < WIDE_PARTS; u++) {
            VD v = vd_load(x + i + u * WIDE_LANES);
            VM ok = vm_finite(v);
            VD kept = vd_pick(ok, v, none);
            s[u] = vd_add(s[u], kept);
            sa[u] = vd_add(sa[u], vd_abs(kept));
            lo = vd_min(lo, vd_pick(ok, v, lo));
            hi = vd_max(hi, vd_pick(ok, v, hi));
            f = vl_count(f, ok);
            nans = vl_count(nans, vm_nan(v));
            inf = vl_count(inf, vm_equal(v, vd_all(INFINITY)));
            z = vl_count(z, vm_equal(v, none));
            neg = vl_count(neg, vm_less(v, none));
        }
    }
    for (int u = 0; u < WIDE_PARTS; u++) {
        vd_store(sum + u * WIDE_LANES, s[u]);
        vd_store(abs_sum + u * WIDE_LANES, sa[u]);
    }
    vd_store(low, lo);
    vd_store(high, hi);
    vl_store(finite, f);
    vl_store(nan, nans);
    vl_store(pos_inf, inf);
    vl_store(zero, z);
    vl_store(negative, neg);
    for (int i = 1; i < WIDE_LANES; i++) {
        low[0] = low[i] < low[0] ? low[i] : low[0];
        high[0] = high[i] > high[0] ? high[i] : high[0];
        finite[0] += finite[i];
        nan[0] += nan[i];
        pos_inf[0] += pos_inf[i];
        zero[0] += zero[i];
        negative[0] += negative[i];
    }
    nan[0] -= padded - n;
    p->nan += nan[0];
    p->pos_inf += pos_inf[0];
    p->neg_inf += n - finite[0] - nan[0] - pos_inf[0];
    p->zero += zero[0];
    p->negative += negative[0];
    if (!finite[0])
        return;
    p->abs_sum += F(add_double_lanes)(abs_sum);
    p->min = low[0] < p->min ? low[0] : p->min;
    p->max = high[0] > p->max ? high[0] : p->max;
    F(add_spread)(x, padded, finite[0], F(add_double_lanes)(sum) / (double)finite[0], p);
}

static void F(sum_once)(const float *x, int n, State *state, Sums *s)
{
#ifdef VU
    if (state->hashes && !state->is_hashed && n == BLOCK) {
        F(sum_and_hash)(x, state->segment.shift, &state->ahead, s, &state->hash);
        state->is_hashed = 1;
        return;
    }
#endif
    F(sum_floats)(x, n, state->segment.shift, &state->ahead, s);
}

static void F(add_floats)(const float *x, int n, State *state)
{
    double wide[BLOCK + 8];
    Segment *segment = &state->segment;
    Sums s;
    for (int attempt = 0; attempt < 2 && !segment->distrust; attempt++) {
        F(sum_once)(x, n, state, &s);
        if (s.min == s.max && s.abs_sum <= FLT_MAX) {
            move_shift(segment, (float)s.min, state->piece); /* equal numbers: no spread, exactly */
            s.sum = s.squares = 0.0;
        } else if (!is_in_range(&s)) {
            break;
        } else if (!is_near_shift(&s, n)) {
            move_shift(segment, (float)(segment->shift + s.sum / n), state->piece);
            continue;
        }
        add_sums(segment, &s, n, state->piece);
        return;
    }
    segment->distrust = segment->distrust ? segment->distrust - 1 : DISTRUST;
    for (int i = 0; i < n; i++)
        wide[i] = x[i];
    F(add_doubles)(wide, n, state->piece);
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

#if LANES >= 8
/* Where 8 floats are zero or not finite. */
static __m256i F(find_uncounted)(const float *x)
{
    __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)x);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_or_si256(_mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256()),
                           _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F7FFFFF)));
}
#endif

/* The bins of 16 floats, in any order. */
static void F(find_bins)(const float *x, uint8_t *bin)
{
#if LANES >= 8
    __m256i first = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(const void *)x), 23);
    __m256i second = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(x + 8)), 23);
    __m256i exponent = _mm256_packs_epi32(first, second), m = _mm256_and_si256(exponent, _mm256_set1_epi16(0xFF));
    m = _mm256_min_epi16(_mm256_subs_epu16(m, _mm256_set1_epi16(126 + LOW_EXPONENT)), _mm256_set1_epi16(MAGNITUDES - 1));
    m = _mm256_or_si256(m, _mm256_and_si256(_mm256_srli_epi16(exponent, 2), _mm256_set1_epi16(MAGNITUDES)));
    m = _mm256_blendv_epi8(m, _mm256_set1_epi16(NO_BIN),
                           _mm256_packs_epi32(F(find_uncounted)(x), F(find_uncounted)(x + 8)));
    _mm_storeu_si128((__m128i *)(void *)bin,
                     _mm_packus_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1)));
#elif LANES > 1 && !defined(PORTABLE)
    __m128i m[4], counted[4], sign[4], narrow[2];
    for (int i = 0; i < 4; i++) {
        __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)(x + 4 * i));
        __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7FFFFFFF));
        m[i] = _mm_sub_epi32(_mm_srli_epi32(magnitude, 23), _mm_set1_epi32(126 + LOW_EXPONENT));
        sign[i] = _mm_srai_epi32(bits, 31);
        counted[i] = _mm_and_si128(_mm_cmpgt_epi32(magnitude, _mm_setzero_si128()),
                                   _mm_cmpgt_epi32(_mm_set1_epi32(0x7F800000), magnitude));
    }
    for (int i = 0; i < 2; i++) {
        __m128i n = _mm_packs_epi32(m[2 * i], m[2 * i + 1]);
        __m128i s = _mm_packs_epi32(sign[2 * i], sign[2 * i + 1]);
        __m128i c = _mm_packs_epi32(counted[2 * i], counted[2 * i + 1]);
        n = _mm_min_epi16(_mm_max_epi16(n, _mm_setzero_si128()), _mm_set1_epi16(MAGNITUDES - 1));
        n = _mm_or_si128(n, _mm_and_si128(s, _mm_set1_epi16(MAGNITUDES)));
        narrow[i] = _mm_or_si128(_mm_and_si128(c, n), _mm_andnot_si128(c, _mm_set1_epi16(NO_BIN)));
    }
    _mm_storeu_si128((__m128i *)(void *)bin, _mm_packus_epi16(narrow[0], narrow[1]));
#else
    for (int i = 0; i < HIST_RUN; i++)
        bin[i] = find_bin(x[i]);
#endif
}

/* Count a block of floats, or one run of each group in it. */
static void F(count_floats)(const float *x, int n, int64_t start, int sampled, HistTables *tables)
{
    uint8_t bin[BLOCK];
    int step = sampled ? HIST_GROUP : HIST_RUN, filled = 0;
    for (int i = 0; i < n; i += step) {
        int at = i + (sampled ? sample_offset((start + i) / HIST_GROUP) : 0);
        if (at + HIST_RUN <= n)
            F(find_bins)(x + at, bin + filled);
        else if (at < n) {
            float last[HIST_RUN] = {0};
            memcpy(last, x + at, (size_t)(n - at) * sizeof *last);
            F(find_bins)(last, bin + filled);
        } else
            break;
        filled += HIST_RUN;
    }
    count_bins(bin, filled, tables);
}

static HashSums F(hash_lines)(const char *raw, int whole, int lines, const char *last)
{
#ifdef VU
    VU products = vu_zero(), plain = vu_zero();
    for (int i = 0; i < lines; i++) {
        const char *from = i < whole ? raw + i * LINE_BYTES : last;
        for (int u = 0; u < PARTS; u++) {
            VU w = vu_load(from + u * LANES * 4);
            VU t = vu_add32(w, vu_load(hash_keys + i * 16 + u * LANES));
            products = vu_add64(products, vu_multiply(t));
            plain = vu_add64(plain, w);
        }
    }
    return (HashSums){vu_sum(products), vu_sum(plain)};
#else
    HashSums sums = {0, 0};
    for (int i = 0; i < lines; i++) {
        const char *from = i < whole ? raw + i * LINE_BYTES : last;
        for (int j = 0; j < 16; j += 2) {
            uint32_t w[2];
            memcpy(w, from + j * 4, sizeof w);
            const uint32_t *key = hash_keys + i * 16 + j;
            sums.products += (uint64_t)(uint32_t)(w[0] + key[0]) * (uint32_t)(w[1] + key[1]);
            sums.plain += w[0] | (uint64_t)w[1] << 32;
        }
    }
    return sums;
#endif
}

static uint64_t F(hash_block)(const char *raw, int bytes, int64_t block)
{
    char last[LINE_BYTES] = {0};
    int whole = bytes / LINE_BYTES, lines = whole + (bytes % LINE_BYTES != 0);
    memcpy(last, raw + whole * LINE_BYTES, (size_t)(bytes % LINE_BYTES));
    return finish_block(F(hash_lines)(raw, whole, lines, last), lines, block);
}

/* The difference of floats to the previous ones, which become the present ones, in one loop: copying each block afterwards
   took a quarter of the time. */
static void F(exchange)(const float *restrict now, float *restrict old, int n, float *restrict difference)
{
    for (int i = 0; i < n; i++) {
        float value = now[i];
        difference[i] = value - old[i];
        old[i] = value;
    }
}

/* The difference to the previous values, in float32 or float64; the previous values become the present ones. */
static const char *F(load_update)(const Task *task, int64_t start, int n, char *to)
{
    float new_floats[BLOCK], old_floats[BLOCK];
    double old_doubles[BLOCK / 2];
    int64_t at = start * type_width[task->type];
    const char *new = task->data + at;
    char *old = task->old + at;
    if (task->type == F32) {
        F(exchange)((const float *)(const void *)new, (float *)(void *)old, n, (float *)(void *)to);
        return to;
    }
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
    double doubles[BLOCK + 8];
    if (is_float(task->measured)) {
        const float *x = F(as_floats)(raw, task->measured, n, floats);
        if (task->want & WANT_STATS)
            F(add_floats)(x, n, state);
        if (task->want & WANT_HIST)
            F(count_floats)(x, n, start, task->count > HIST_FULL, &state->tables);
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
    uint64_t gathered[HASH_BYTES / 8], clean[HASH_BYTES / 8];
    int width = type_width[task->measured], per_block = HASH_BYTES / width;
    int64_t first = chunk * CHUNK_BLOCKS;
    State state;
    start_state(&state, p, task);
    for (int64_t block = first; block < first + CHUNK_BLOCKS && block * per_block < task->count; block++) {
        int64_t start = block * per_block, nan = p->nan;
        int n = task->count - start < per_block ? (int)(task->count - start) : per_block;
        const char *raw = task->data + start * width;
        state.is_hashed = 0;
        if (task->old)
            raw = F(load_update)(task, start, n, (char *)gathered);
        else if (task->layout) {
            gather(task->layout, task->data, start, n, width, (char *)gathered);
            raw = (const char *)gathered;
        }
        look_ahead(&state, task, start + n, raw);
        if (task->want & (WANT_STATS | WANT_HIST))
            for (int at = 0; at < n; at += BLOCK)
                F(add_elements)(task, raw + at * width, n - at < BLOCK ? n - at : BLOCK, start + at, &state);
        if (task->want & WANT_HASH) {
            int has_nan = p->nan != nan || task->has_nan;
            if (has_nan)
                raw = unify_nans(raw, task->measured, n, (char *)clean);
            p->hash += state.is_hashed && !has_nan ? finish_block(state.hash, HASH_LINES, block)
                                                   : F(hash_block)(raw, n * width, block);
        }
    }
    finish_state(&state, task->want);
}

#undef PARTS
#undef vf_least
#undef vf_greatest
#undef vi_sum
#undef WIDE_LANES
#undef WIDE_PARTS
