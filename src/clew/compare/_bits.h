/* Floating-point numbers by their bits: the types, their values, their rank among all, and those that are denormal. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32, F64, F16, BF16, TYPES };

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif
#if defined(__GNUC__)
#define SIMD(clauses) _Pragma(clauses)
#define INLINE static inline __attribute__((always_inline))
#else
#define SIMD(clauses)
#define INLINE static inline
#endif

static const int type_width[TYPES] = {4, 8, 2, 2};

/* Position of a number among all of its type, both zeros at `half`. */
static uint64_t rank_of(uint64_t bits, int width)
{
    uint64_t half = UINT64_C(1) << (8 * width - 1), magnitude = bits & (half - 1);
    return bits & half ? half - magnitude : half + magnitude;
}

static double as_half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31)
        return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
}

static double as_double(const char *raw, int type, uint64_t *bits)
{
    uint16_t half;
    uint32_t word;
    float single;
    double value;
    if (type == F64) {
        memcpy(bits, raw, sizeof *bits);
        memcpy(&value, raw, sizeof value);
        return value;
    }
    if (type == F32) {
        memcpy(&word, raw, sizeof word);
        *bits = word;
    } else {
        memcpy(&half, raw, sizeof half);
        *bits = half;
        if (type == F16)
            return as_half(half);
        word = (uint32_t)half << 16;
    }
    memcpy(&single, &word, sizeof single);
    return single;
}

#define COUNT_TINY(TYPE)                                        \
    for (int64_t i = 0; i < n; i++) {                           \
        TYPE magnitude = ((const TYPE *)raw)[i] & (TYPE)mask;   \
        tiny += magnitude && magnitude < (TYPE)smallest;        \
    }

/* Numbers above zero and below the smallest normal one, by their bits. */
WIDE static int count_tiny(const void *raw, int width, int n, uint64_t smallest)
{
    uint64_t mask = (UINT64_C(1) << (8 * width - 1)) - 1;
    int tiny = 0;
    if (width == 2)
        COUNT_TINY(uint16_t)
    else if (width == 4)
        COUNT_TINY(uint32_t)
    else
        COUNT_TINY(uint64_t)
    return tiny;
}
