/* The vector operations of one instruction set, LANES floats wide. Included once per variant by _lanes.h. */

/* Keeps the compiler from joining the steps of these sums, for which it would move other sums out of their registers. */
#define STAY(a, b, c) __asm__("" : "+x"(a), "+x"(b), "+x"(c))

#undef VF
#undef VI
#undef VU
#undef vf_load
#undef vf_store
#undef vf_all
#undef vf_add
#undef vf_sub
#undef vf_mul
#undef vf_min
#undef vf_max
#undef vf_abs
#undef vi_zero
#undef vi_store
#undef vi_count_zero
#undef vi_count_positive
#undef vi_count
#undef vi_bytes
#undef vi_count_four
#undef vi_split
#undef vf_least
#undef vf_greatest
#undef vi_sum
#undef VE
#undef ve_all
#undef ve_low
#undef ve_high
#undef ve_near
#undef ve_least
#undef ve_most
#undef ve_nearest
#undef VD
#undef VM
#undef VL
#undef vd_load
#undef vd_store
#undef vd_all
#undef vd_add
#undef vd_sub
#undef vd_mul
#undef vd_min
#undef vd_max
#undef vd_abs
#undef vd_pick
#undef vm_finite
#undef vm_equal
#undef vm_less
#undef vm_nan
#undef vl_zero
#undef vl_store
#undef vl_count
#undef vu_load
#undef vu_bits
#undef vu_sum
#undef vu_stay
#undef vu_zero
#undef vu_add32
#undef vu_add64
#undef vu_multiply

#if LANES == 16
#define VF __m512
#define VI __m512i
#define VU __m512i
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, v) _mm512_storeu_ps(p, v)
#define vf_all(x) _mm512_set1_ps(x)
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_abs(a) _mm512_abs_ps(a)
#define vi_zero() _mm512_setzero_si512()
/* Both counts share a register, one in the upper half of each number, until they are split: masks that went to other
   registers to be counted there would take the turns of the sums. */
#define vi_count(z, pos, x)                                                                                           \
    z = _mm512_mask_add_epi32(z, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), z, _mm512_set1_epi32(1));    \
    z = _mm512_mask_add_epi32(z, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ), z, _mm512_set1_epi32(1 << 16))
#define vi_split(z, pos)                                         \
    pos = _mm512_and_si512(z, _mm512_set1_epi32(0xFFFF));        \
    z = _mm512_srli_epi32(z, 16)
/* The same of four vectors at once, as bytes: packing saturates, so numbers stay above, below or at zero. A NaN is counted
   for a number: its sums are not used. With 16 registers there is no room for this. */
#define vi_bytes(a, b, c, d)                                                                                          \
    _mm512_packs_epi16(_mm512_packs_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)),                            \
                       _mm512_packs_epi32(_mm512_castps_si512(c), _mm512_castps_si512(d)))
#define vi_count_four(z, pos, v)                                                                                      \
    pos += _mm_popcnt_u64(_mm512_cmpgt_epi8_mask(vi_bytes(v[0], v[1], v[2], v[3]), _mm512_setzero_si512()));          \
    z += _mm_popcnt_u64(_mm512_testn_epi8_mask(vi_bytes(vf_abs(v[0]), vf_abs(v[1]), vf_abs(v[2]), vf_abs(v[3])),      \
                                               _mm512_set1_epi8(-1)))
/* The extremes, as bits: on AMD's processors the units that compare floats are those that add them up. Unsigned, the
   greatest bits are those of the least number if one is negative; signed, those of the greatest if one is not. */
#define VE __m512i
#define ve_all(x) _mm512_castps_si512(_mm512_set1_ps(x))
#define ve_low(e, v) _mm512_max_epu32(e, _mm512_castps_si512(v))
#define ve_high(e, v) _mm512_max_epi32(e, _mm512_castps_si512(v))
#define ve_near(e, v) _mm512_min_epu32(e, _mm512_castps_si512(v))
#define ve_least(e) _mm512_reduce_max_epu32(e)
#define ve_most(e) _mm512_reduce_max_epi32(e)
#define ve_nearest(e) _mm512_reduce_min_epu32(e)
#define VD __m512d
#define VL __m512i
#define vd_load(p) _mm512_loadu_pd(p)
#define vd_store(p, v) _mm512_storeu_pd(p, v)
#define vd_all(x) _mm512_set1_pd(x)
#define vd_add(a, b) _mm512_add_pd(a, b)
#define vd_sub(a, b) _mm512_sub_pd(a, b)
#define vd_mul(a, b) _mm512_mul_pd(a, b)
#define vd_min(a, b) _mm512_min_pd(a, b)
#define vd_max(a, b) _mm512_max_pd(a, b)
#define vl_zero() _mm512_setzero_si512()
#define vl_store(p, v) _mm512_storeu_si512(p, v)
#define VM __mmask8
#define vd_abs(a) _mm512_abs_pd(a)
#define vd_pick(m, a, b) _mm512_mask_blend_pd(m, b, a)
#define vm_finite(v) vm_equal(_mm512_sub_pd(v, v), _mm512_setzero_pd())
#define vm_equal(a, b) _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ)
#define vm_less(a, b) _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ)
#define vm_nan(v) _mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q)
#define vl_count(c, m) _mm512_mask_add_epi64(c, m, c, _mm512_set1_epi64(1))
#define vu_load(p) _mm512_loadu_si512(p)
#define vu_bits(v) _mm512_castps_si512(v)
#define vu_stay(a, b, c) /* there are registers for all */
#define vu_sum(v) ((uint64_t)_mm512_reduce_add_epi64(v))
#define vu_zero() _mm512_setzero_si512()
#define vu_add32(a, b) _mm512_add_epi32(a, b)
#define vu_add64(a, b) _mm512_add_epi64(a, b)
#define vu_multiply(a) _mm512_mul_epu32(a, _mm512_srli_epi64(a, 32))
#elif LANES == 8
#define VF __m256
#define VI __m256i
#define VU __m256i
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, v) _mm256_storeu_ps(p, v)
#define vf_all(x) _mm256_set1_ps(x)
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_min(a, b) _mm256_min_ps(a, b)
#define vf_max(a, b) _mm256_max_ps(a, b)
#define vf_abs(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define vi_zero() _mm256_setzero_si256()
#define vi_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
/* As integers, since of the units that compare floats there are two, and the sums have enough for them to do. Both counts
   share a register, as numbers of 16 bits, until they are split: of 16 registers the sums take most. */
#define vi_count(z, pos, x)                                                                                           \
    z = _mm256_sub_epi16(z, _mm256_packs_epi32(                                                                       \
                                _mm256_cmpeq_epi32(_mm256_castps_si256(vf_abs(x)), _mm256_setzero_si256()),           \
                                _mm256_cmpgt_epi32(_mm256_castps_si256(x), _mm256_setzero_si256())))
#define vi_split(z, pos)                                         \
    z = _mm256_madd_epi16(z, _mm256_set1_epi16(1));              \
    pos = _mm256_blend_epi32(z, _mm256_setzero_si256(), 0x33);   \
    z = _mm256_blend_epi32(z, _mm256_setzero_si256(), 0xCC)
#define VD __m256d
#define VL __m256i
#define vd_load(p) _mm256_loadu_pd(p)
#define vd_store(p, v) _mm256_storeu_pd(p, v)
#define vd_all(x) _mm256_set1_pd(x)
#define vd_add(a, b) _mm256_add_pd(a, b)
#define vd_sub(a, b) _mm256_sub_pd(a, b)
#define vd_mul(a, b) _mm256_mul_pd(a, b)
#define vd_min(a, b) _mm256_min_pd(a, b)
#define vd_max(a, b) _mm256_max_pd(a, b)
#define vl_zero() vi_zero()
#define vl_store(p, v) vi_store(p, v)
#define VM __m256d
#define vd_abs(a) _mm256_andnot_pd(_mm256_set1_pd(-0.0), a)
#define vd_pick(m, a, b) _mm256_blendv_pd(b, a, m)
#define vm_finite(v) vm_equal(_mm256_sub_pd(v, v), _mm256_setzero_pd())
#define vm_equal(a, b) _mm256_cmp_pd(a, b, _CMP_EQ_OQ)
#define vm_less(a, b) _mm256_cmp_pd(a, b, _CMP_LT_OQ)
#define vm_nan(v) _mm256_cmp_pd(v, v, _CMP_UNORD_Q)
#define vl_count(c, m) _mm256_sub_epi64(c, _mm256_castpd_si256(m))
#define vu_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vu_bits(v) _mm256_castps_si256(v)
#define vu_stay(a, b, c) STAY(a, b, c)
#define vu_sum(v) F(sum_words)(v)
#define vu_zero() _mm256_setzero_si256()
#define vu_add32(a, b) _mm256_add_epi32(a, b)
#define vu_add64(a, b) _mm256_add_epi64(a, b)
#define vu_multiply(a) _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32))
#elif LANES == 4 && defined(PORTABLE) /* the vectors of GNU C: any processor */
#define VF v4f
#define VI v4i
#define vf_load(p) load_v4f(p)
#define vf_store(p, v) store_vector(p, &(v))
#define vf_all(x) ((v4f){x, x, x, x})
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_min(a, b) pick_v4f((a) < (b), a, b)
#define vf_max(a, b) pick_v4f((a) > (b), a, b)
#define vf_abs(a) ((v4f)((v4i)(a) & 0x7FFFFFFF))
#define vi_zero() ((v4i){0})
#define vi_store(p, v) store_vector(p, &(v))
#define vi_count_zero(c, x) ((c) - ((x) == (v4f){0}))
#define vi_count_positive(c, x) ((c) - ((x) > (v4f){0}))
#define VD v2d
#define VL v2l
#define VM v2l
#define vd_load(p) load_v2d(p)
#define vd_store(p, v) store_vector(p, &(v))
#define vd_all(x) ((v2d){x, x})
#define vd_add(a, b) ((a) + (b))
#define vd_sub(a, b) ((a) - (b))
#define vd_mul(a, b) ((a) * (b))
#define vd_min(a, b) pick_v2d((a) < (b), a, b)
#define vd_max(a, b) pick_v2d((a) > (b), a, b)
#define vd_abs(a) ((v2d)((v2l)(a) & INT64_MAX))
#define vd_pick(m, a, b) pick_v2d(m, a, b)
#define vm_finite(v) ((v) - (v) == (v2d){0})
#define vm_equal(a, b) ((a) == (b))
#define vm_less(a, b) ((a) < (b))
#define vm_nan(v) ((v) != (v))
#define vl_zero() ((v2l){0})
#define vl_store(p, v) store_vector(p, &(v))
#define vl_count(c, m) ((c) - (m))
#elif LANES == 4
#define VF __m128
#define VI __m128i
#define VU __m128i
#define vf_load(p) _mm_loadu_ps(p)
#define vf_store(p, v) _mm_storeu_ps(p, v)
#define vf_all(x) _mm_set1_ps(x)
#define vf_add(a, b) _mm_add_ps(a, b)
#define vf_sub(a, b) _mm_sub_ps(a, b)
#define vf_mul(a, b) _mm_mul_ps(a, b)
#define vf_min(a, b) _mm_min_ps(a, b)
#define vf_max(a, b) _mm_max_ps(a, b)
#define vf_abs(a) _mm_andnot_ps(_mm_set1_ps(-0.0f), a)
#define vi_zero() _mm_setzero_si128()
#define vi_store(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define vi_count_zero(c, x) _mm_sub_epi32(c, _mm_castps_si128(_mm_cmpeq_ps(x, _mm_setzero_ps())))
#define vi_count_positive(c, x) _mm_sub_epi32(c, _mm_castps_si128(_mm_cmpgt_ps(x, _mm_setzero_ps())))
#define VD __m128d
#define VL __m128i
#define vd_load(p) _mm_loadu_pd(p)
#define vd_store(p, v) _mm_storeu_pd(p, v)
#define vd_all(x) _mm_set1_pd(x)
#define vd_add(a, b) _mm_add_pd(a, b)
#define vd_sub(a, b) _mm_sub_pd(a, b)
#define vd_mul(a, b) _mm_mul_pd(a, b)
#define vd_min(a, b) _mm_min_pd(a, b)
#define vd_max(a, b) _mm_max_pd(a, b)
#define vl_zero() vi_zero()
#define vl_store(p, v) vi_store(p, v)
#define VM __m128d
#define vd_abs(a) _mm_andnot_pd(_mm_set1_pd(-0.0), a)
#define vd_pick(m, a, b) _mm_or_pd(_mm_and_pd(m, a), _mm_andnot_pd(m, b))
#define vm_finite(v) vm_equal(_mm_sub_pd(v, v), _mm_setzero_pd())
#define vm_equal(a, b) _mm_cmpeq_pd(a, b)
#define vm_less(a, b) _mm_cmplt_pd(a, b)
#define vm_nan(v) _mm_cmpunord_pd(v, v)
#define vl_count(c, m) _mm_sub_epi64(c, _mm_castpd_si128(m))
#define vu_load(p) _mm_loadu_si128((const __m128i *)(p))
#define vu_bits(v) _mm_castps_si128(v)
#define vu_stay(a, b, c) STAY(a, b, c)
#define vu_sum(v) ((uint64_t)_mm_cvtsi128_si64(v) + (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(v, v)))
#define vu_zero() _mm_setzero_si128()
#define vu_add32(a, b) _mm_add_epi32(a, b)
#define vu_add64(a, b) _mm_add_epi64(a, b)
#define vu_multiply(a) _mm_mul_epu32(a, _mm_srli_epi64(a, 32))
#else /* one lane: plain C for every other compiler and processor, which may vectorise it by itself */
#define VF float
#define VI int32_t
#define vf_load(p) (*(p))
#define vf_store(p, v) (*(p) = (v))
#define vf_all(x) (x)
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_min(a, b) ((a) < (b) ? (a) : (b))
#define vf_max(a, b) ((a) > (b) ? (a) : (b))
#define vf_abs(a) fabsf(a)
#define vi_zero() 0
#define vi_store(p, v) (*(p) = (v))
#define vi_count_zero(c, x) ((c) + ((x) == 0.0f))
#define vi_count_positive(c, x) ((c) + ((x) > 0.0f))
#define VD double
#define VL int64_t
#define VM int
#define vd_load(p) (*(p))
#define vd_store(p, v) (*(p) = (v))
#define vd_all(x) (x)
#define vd_add(a, b) ((a) + (b))
#define vd_sub(a, b) ((a) - (b))
#define vd_mul(a, b) ((a) * (b))
#define vd_min(a, b) ((a) < (b) ? (a) : (b))
#define vd_max(a, b) ((a) > (b) ? (a) : (b))
#define vd_abs(a) fabs(a)
#define vd_pick(m, a, b) ((m) ? (a) : (b))
#define vm_finite(v) ((v) - (v) == 0.0)
#define vm_equal(a, b) ((a) == (b))
#define vm_less(a, b) ((a) < (b))
#define vm_nan(v) ((v) != (v))
#define vl_zero() 0
#define vl_store(p, v) (*(p) = (v))
#define vl_count(c, m) ((c) + (m))
#endif

#ifndef vi_count
#define vi_count(z, pos, x) (z) = vi_count_zero(z, x), (pos) = vi_count_positive(pos, x)
#define vi_split(z, pos)
#endif

#ifndef VE
#define VE VF
#define ve_all(x) vf_all(x)
#define ve_low(e, v) vf_min(e, v)
#define ve_high(e, v) vf_max(e, v)
#endif

/* One number of all lanes. */

#if LANES == 16
#define vi_sum(v) _mm512_reduce_add_epi32(v)
#elif LANES == 8
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
#else
static float F(find_least)(VF v)
{
    float lane[LANES];
    vf_store(lane, v);
    for (int i = 1; i < LANES; i++)
        lane[0] = lane[i] < lane[0] ? lane[i] : lane[0];
    return lane[0];
}

static float F(find_greatest)(VF v)
{
    float lane[LANES];
    vf_store(lane, v);
    for (int i = 1; i < LANES; i++)
        lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}

static int32_t F(add_counts)(VI v)
{
    int32_t lane[LANES];
    vi_store(lane, v);
    for (int i = 1; i < LANES; i++)
        lane[0] += lane[i];
    return lane[0];
}

#define vf_least(v) F(find_least)(v)
#define vf_greatest(v) F(find_greatest)(v)
#define vi_sum(v) F(add_counts)(v)
#endif
