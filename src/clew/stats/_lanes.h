/* The loops over elements, once per instruction set: the includer defines LANES and F(name).

   A tensor is read in stretches of some blocks that stay in the first-level cache. Of a stretch of floats, sums of
   x - shift are speculated, in float32 over a block and in float64 over blocks, without asking whether a number is finite: a
   NaN or an infinity, an overflow, an underflow or too much cancellation shows in the sums themselves, and only then the
   stretch is done again, about its own mean or in float64. Sixteen float32 sums run side by side whatever the width of a
   vector, and nothing is fused, so every instruction set gives the same bits. */

#include "_vectors.h"

#define PARTS (16 / LANES)
#define WIDE_LANES ((LANES + 1) / 2)
#define WIDE_PARTS (8 / WIDE_LANES)

static double F(add_double_lanes)(const double *lane)
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* Add the 16 float32 sums of a block to eight in double, in a fixed order. */
static INLINED void F(fold)(const VF *part, double *to)
{
#if LANES == 16
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(part[0]));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(part[0], 1));
    _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), _mm512_add_pd(low, high)));
#elif LANES == 8
    __m256d low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(part[0])),
                                _mm256_cvtps_pd(_mm256_castps256_ps128(part[1])));
    __m256d high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(part[0], 1)),
                                 _mm256_cvtps_pd(_mm256_extractf128_ps(part[1], 1)));
    _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), low));
    _mm256_storeu_pd(to + 4, _mm256_add_pd(_mm256_loadu_pd(to + 4), high));
#else
    float lane[16];
    for (int u = 0; u < PARTS; u++)
        vf_store(lane + u * LANES, part[u]);
    for (int i = 0; i < 8; i++)
        to[i] += (double)lane[i] + (double)lane[i + 8];
#endif
}

/* What is added up of a block of floats. */
typedef struct {
    VF s1[PARTS], s2[PARTS], sa[PARTS];
    VE lo, hi;
#ifdef VU
    VU products, plain;
#endif
} F(Line);

/* Take LANES floats, of which `key` has the keys if they are hashed; return them. */
static INLINED VF F(add_vector)(F(Line) *line, int u, const float *x, int shifted, VF shift, const uint32_t *key)
{
    VF v = vf_load(x), d = shifted ? vf_sub(v, shift) : v;
    line->s1[u] = vf_add(line->s1[u], d);
    line->s2[u] = vf_add(line->s2[u], vf_mul(d, d));
    line->sa[u] = vf_add(line->sa[u], vf_abs(v));
    line->lo = ve_low(line->lo, v);
    line->hi = ve_high(line->hi, v);
#ifdef VU
    if (key) {
        VU w = vu_bits(v), t = vu_add32(w, vu_load(key));
        line->products = vu_add64(line->products, vu_multiply(t));
        line->plain = vu_add64(line->plain, w);
    }
#else
    (void)key;
#endif
    return v;
}

#ifdef ve_near
/* Of floats that all have one sign, the one nearest to zero: the extreme that their greatest bits do not tell. */
static APART float F(find_nearest)(const float *x, int n)
{
    VE nearest = ve_all(x[0]);
    for (int i = 0; i < n; i += LANES)
        nearest = ve_near(nearest, vf_load(x + i));
    return as_float(ve_nearest(nearest));
}
#endif

/* The least and the greatest of n floats, of which the zeros are counted. */
static INLINED void F(tell_extremes)(const F(Line) *line, const float *x, int n, Sums *out)
{
#ifdef ve_near
    uint32_t low = ve_least(line->lo);
    int32_t high = ve_most(line->hi);
    out->min = low >> 31 ? as_float(low) : out->zero ? 0.0f : F(find_nearest)(x, n);
    out->max = high >= 0 ? as_float((uint32_t)high) : F(find_nearest)(x, n);
#else
    (void)x, (void)n;
    out->min = vf_least(line->lo);
    out->max = vf_greatest(line->hi);
#endif
}

/* Sums of n floats, block by block in float32 and over blocks in double, and of whole blocks whose hash is asked for the
   sums of that; whether `hash` is asked for, numbers are `shifted` and more is fetched from `beside` them is known when
   compiling. What comes after a block is fetched meanwhile, all of it and once: the processor by itself does not look
   beyond a page, and does not look far enough ahead of so much arithmetic (on a Xeon that cost a quarter of the speed). */
static INLINED void F(sum_lines)(const float *x, int n, int shifted, float shift, const Ahead *ahead, int beside, Sums *out,
                                 HashSums *hash)
{
    double sum[8] = {0}, squares[8] = {0}, abs_sum[8] = {0};
    F(Line) line = {.lo = ve_all(x[0]), .hi = ve_all(x[0])};
    VF k = vf_all(shift);
    VI z = vi_zero(), pos = vi_zero();
    int64_t zero = 0, positive = 0;
    int whole = n & ~15;
    for (int at = 0; at < whole; at += BLOCK) {
        int end = whole - at < BLOCK ? whole : at + BLOCK, i = at;
        const char *first = at < ahead->reach ? ahead->first : (const char *)x;
        const char *second = at < ahead->reach && beside ? ahead->second : (const char *)x;
        for (int u = 0; u < PARTS; u++)
            line.s1[u] = line.s2[u] = line.sa[u] = vf_all(0.0f);
#ifdef VU
        line.products = line.plain = vu_zero();
#endif
#ifdef vi_count_four
        for (; i + 64 <= end; i += 64) {
            VF v[4];
            for (int u = 0; u < 4; u++) {
                FETCH(first + i * 4 + u * LINE_BYTES);
                if (beside)
                    FETCH(second + i * 4 + u * LINE_BYTES);
                v[u] = F(add_vector)(&line, 0, x + i + u * 16, shifted, k, hash ? hash_keys + i - at + u * 16 : NULL);
            }
            vi_count_four(zero, positive, v);
        }
#endif
        for (; i < end; i += 16) {
            FETCH(first + i * 4);
            if (beside)
                FETCH(second + i * 4);
            for (int u = 0; u < PARTS; u++) {
                int j = i + u * LANES;
                VF v = F(add_vector)(&line, u, x + j, shifted, k, hash ? hash_keys + j - at : NULL);
                vi_count(z, pos, v);
#ifdef VU
                if (hash)
                    vu_stay(z, line.products, line.plain);
#endif
            }
        }
        F(fold)(line.s1, sum);
        F(fold)(line.s2, squares);
        F(fold)(line.sa, abs_sum);
#ifdef VU
        if (hash)
            hash[at / BLOCK] = (HashSums){vu_sum(line.products), vu_sum(line.plain)};
#endif
    }
    vi_split(z, pos);
    *out = (Sums){.zero = zero + vi_sum(z), .positive = positive + vi_sum(pos)};
    F(tell_extremes)(&line, x, whole, out);
    for (int i = whole; i < n; i++) {
        float v = x[i], d = v - shift;
        sum[i & 7] += d;
        squares[i & 7] += d * d;
        abs_sum[i & 7] += fabsf(v);
        out->min = v < out->min ? v : out->min;
        out->max = v > out->max ? v : out->max;
        out->zero += v == 0.0f;
        out->positive += v > 0.0f;
    }
    out->sum = F(add_double_lanes)(sum);
    out->squares = F(add_double_lanes)(squares);
    out->abs_sum = F(add_double_lanes)(abs_sum);
}

/* Apart from their callers, so that their loops have all registers to themselves. */
static APART void F(sum_floats)(const float *x, int n, const Ahead *ahead, Sums *out)
{
    F(sum_lines)(x, n, 0, 0.0f, ahead, 0, out, NULL);
}

static APART void F(sum_update)(const float *x, int n, const Ahead *ahead, Sums *out)
{
    F(sum_lines)(x, n, 0, 0.0f, ahead, 1, out, NULL);
}

static APART void F(sum_shifted)(const float *x, int n, float shift, const Ahead *ahead, Sums *out)
{
    F(sum_lines)(x, n, 1, shift, ahead, 0, out, NULL);
}

#ifdef VU
static APART void F(sum_and_hash)(const float *x, int n, const Ahead *ahead, Sums *out, HashSums *hash)
{
    F(sum_lines)(x, n, 0, 0.0f, ahead, 0, out, hash);
}

static APART void F(sum_and_hash_update)(const float *x, int n, const Ahead *ahead, Sums *out, HashSums *hash)
{
    F(sum_lines)(x, n, 0, 0.0f, ahead, 1, out, hash);
}
#endif

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
    float shift = state->segment.shift;
    const Ahead *ahead = &state->ahead;
#ifdef VU
    if (state->hashes && !state->is_hashed && n % BLOCK == 0 && shift == 0.0f) {
        (ahead->second ? F(sum_and_hash_update) : F(sum_and_hash))(x, n, ahead, s, state->hash);
        state->is_hashed = 1;
        return;
    }
#endif
    if (shift != 0.0f)
        F(sum_shifted)(x, n, shift, ahead, s);
    else
        (ahead->second ? F(sum_update) : F(sum_floats))(x, n, ahead, s);
}

/* Whether float32 was enough for these numbers. */
static int F(add_quickly)(const float *x, int n, State *state)
{
    Segment *segment = &state->segment;
    Sums s;
    for (int attempt = 0; attempt < 2 && !segment->distrust; attempt++) {
        F(sum_once)(x, n, state, &s);
        if (s.min == s.max && s.abs_sum <= FLT_MAX) {
            move_shift(segment, (float)s.min, state->piece); /* equal numbers: no spread, exactly */
            s.sum = s.squares = 0.0;
        } else if (!is_in_range(&s)) {
            return 0;
        } else if (!is_near_shift(&s, n)) {
            move_shift(segment, (float)(segment->shift + s.sum / n), state->piece);
            continue;
        }
        add_sums(segment, &s, n, state->piece);
        return 1;
    }
    return 0;
}

static void F(add_floats)(const float *x, int n, State *state)
{
    double wide[BLOCK + 8];
    Segment *segment = &state->segment;
    if (F(add_quickly)(x, n, state))
        return;
    segment->distrust = segment->distrust ? segment->distrust - 1 : DISTRUST;
    for (int at = 0; at < n; at += BLOCK) {
        int some = n - at < BLOCK ? n - at : BLOCK;
        for (int i = 0; i < some; i++)
            wide[i] = x[at + i];
        F(add_doubles)(wide, some, state->piece);
    }
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

#include "_update.h"

/* Statistics of n elements. */
static void F(add_elements)(const Task *task, const char *raw, int n, State *state)
{
    float floats[STRETCH];
    double doubles[BLOCK + 8];
    int width = type_width[task->measured], most = is_float(task->measured) ? STRETCH : BLOCK;
    for (int at = 0; at < n; at += most) {
        int some = n - at < most ? n - at : most;
        if (is_float(task->measured)) {
            F(add_floats)(F(as_floats)(raw + at * width, task->measured, some, floats), some, state);
        } else {
            as_doubles(raw + at * width, task->measured, some, doubles);
            F(add_doubles)(doubles, some, state->piece);
        }
    }
}

/* Histogram of n elements, which start at position `start` of the tensor. */
static void F(count_elements)(const Task *task, const char *raw, int n, int64_t start, State *state)
{
    float floats[BLOCK];
    double doubles[BLOCK];
    int width = type_width[task->measured], sampled = task->count > HIST_FULL;
    for (int at = 0; at < n; at += BLOCK) {
        int some = n - at < BLOCK ? n - at : BLOCK;
        if (is_float(task->measured)) {
            const float *x = F(as_floats)(raw + at * width, task->measured, some, floats);
            F(count_floats)(x, some, start + at, sampled, &state->tables);
        } else {
            as_doubles(raw + at * width, task->measured, some, doubles);
            count_doubles(doubles, some, start + at, sampled, &state->tables);
        }
    }
}

/* Hash of n elements, which start at this block of the tensor. */
static void F(hash_elements)(const Task *task, const char *raw, int n, int64_t block, int has_nan, State *state)
{
    uint64_t clean[HASH_BYTES / 8];
    int width = type_width[task->measured], per_block = HASH_BYTES / width;
    for (int at = 0; at < n; at += per_block, block++) {
        int some = n - at < per_block ? n - at : per_block;
        const char *from = raw + at * width;
        if (state->is_hashed && !has_nan)
            state->piece->hash += finish_block(state->hash[at / per_block], HASH_LINES, block);
        else
            state->piece->hash += F(hash_block)(has_nan ? unify_nans(from, task->measured, some, (char *)clean) : from,
                                                some * width, block);
    }
}

static void F(run_chunk)(const Task *task, int64_t chunk, Piece *p)
{
    uint64_t gathered[STRETCH_BYTES / 8];
    int width = type_width[task->measured], per_block = HASH_BYTES / width;
    int most = task->old ? per_block : STRETCH_BYTES / width; /* an update is three times as much memory */
    int64_t first = chunk * CHUNK_BLOCKS * per_block, end = first + CHUNK_BLOCKS * per_block;
    State state;
    start_state(&state, p, task);
    for (int64_t start = first; start < end && start < task->count; start += most) {
        int64_t nan = p->nan;
        int n = task->count - start < most ? (int)(task->count - start) : most;
        const char *raw = task->old || task->layout ? (const char *)gathered : task->data + start * width;
        state.is_hashed = 0;
        if (task->old)
            F(load_update)(task, start, n, (char *)gathered);
        else if (task->layout)
            gather(task->layout, task->data, start, n, width, (char *)gathered);
        look_ahead(&state, task, start, n);
        if (task->want & WANT_STATS)
            F(add_elements)(task, raw, n, &state);
        if (task->want & WANT_HIST)
            F(count_elements)(task, raw, n, start, &state);
        if (task->want & WANT_HASH)
            F(hash_elements)(task, raw, n, start / per_block, p->nan != nan || task->has_nan, &state);
    }
    finish_state(&state, task->want);
}

#undef PARTS
#undef WIDE_LANES
#undef WIDE_PARTS
