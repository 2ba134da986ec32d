/* The sums of compare/metric.py over two flat arrays, in one pass.

   Elements are taken 16 at a time with the vector extension of GCC and Clang, so one text serves every instruction
   set; where the compiler offers it, clones for wider vectors are chosen at load time. In a block of BLOCK elements
   sums run in float32 lanes without asking whether a number is finite: a NaN, an infinity, an overflow or an
   underflow shows in the sums themselves, and only then the block is done again, one element at a time in double. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32, F64, F16, BF16, TYPES };
enum {
    COUNT, EQUAL, NONFINITE, FINITE, GREATER, LESS, WITHIN_1E3, WITHIN_5E3, ULP_OVER,
    ERROR_SQUARES, A_SQUARES, B_SQUARES, PRODUCTS, ULPS,
    MAX_ABS, MAX_ABS_AT, MAX_REL, MAX_ULP, A_ABS_MAX, B_ABS_MAX, SUMS
};
enum { BLOCK = 512, LANES = 16, ULP_LIMIT = 32 };

typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
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
    switch (type) {
    case F64:
        memcpy(bits, raw, sizeof *bits);
        memcpy(&value, raw, sizeof value);
        return value;
    case F32:
        memcpy(&word, raw, sizeof word);
        break;
    default:
        memcpy(&half, raw, sizeof half);
        *bits = half;
        if (type == F16)
            return as_half(half);
        word = (uint32_t)half << 16;
    }
    if (type == F32)
        *bits = word;
    memcpy(&single, &word, sizeof single);
    return single;
}

/* One element after another, in double: every case is handled. */
static void add_slowly(const char *a, const char *b, int type, int64_t from, int n, double floor, double *out)
{
    int width = type_width[type];
    for (int i = 0; i < n; i++) {
        uint64_t x_bits, y_bits;
        double x = as_double(a + i * width, type, &x_bits), y = as_double(b + i * width, type, &y_bits);
        int equal = x == y || (x != x && y != y), finite = x - x == 0.0 && y - y == 0.0;
        out[EQUAL] += equal;
        out[NONFINITE] += !equal && !finite;
        if (!finite)
            continue;
        uint64_t x_rank = rank_of(x_bits, width), y_rank = rank_of(y_bits, width);
        double error = y - x, distance = fabs(error), size = fabs(x) > floor ? fabs(x) : floor;
        double relative = distance > 0.0 ? distance / size : 0.0;
        double ulps = (double)(x_rank > y_rank ? x_rank - y_rank : y_rank - x_rank);
        out[FINITE]++;
        out[GREATER] += error > 0.0;
        out[LESS] += error < 0.0;
        out[WITHIN_1E3] += distance <= 1e-3 * size;
        out[WITHIN_5E3] += distance <= 5e-3 * size;
        out[ULP_OVER] += ulps > ULP_LIMIT;
        out[ERROR_SQUARES] += error * error;
        out[A_SQUARES] += x * x;
        out[B_SQUARES] += y * y;
        out[PRODUCTS] += x * y;
        out[ULPS] += ulps;
        out[A_ABS_MAX] = fabs(x) > out[A_ABS_MAX] ? fabs(x) : out[A_ABS_MAX];
        out[B_ABS_MAX] = fabs(y) > out[B_ABS_MAX] ? fabs(y) : out[B_ABS_MAX];
        out[MAX_REL] = relative > out[MAX_REL] ? relative : out[MAX_REL];
        out[MAX_ULP] = ulps > out[MAX_ULP] ? ulps : out[MAX_ULP];
        if (distance > out[MAX_ABS] || out[MAX_ABS_AT] < 0) {
            out[MAX_ABS] = distance;
            out[MAX_ABS_AT] = (double)(from + i);
        }
    }
}

/* What a block of floats gives when all of it is finite and in the range where float32 sums keep their meaning. */
typedef struct {
    Floats error_squares, a_squares, b_squares, products, ulps;
    Floats max_abs, max_rel, a_abs_max, b_abs_max;
    Ints equal, greater, less, within_1e3, within_5e3, ulp_over;
    Words max_ulp;
} Lanes;

#define SELECT(mask, yes, no) ((__typeof__(yes))(((Ints)(yes) & (mask)) | ((Ints)(no) & ~(mask))))
#define LARGER(x, y) SELECT((Ints)((x) > (y)), x, y)
#define MAGNITUDE(x) ((Floats)((Ints)(x) & 0x7FFFFFFF))

#define INLINE static inline __attribute__((always_inline))

/* Sixteen elements as floats, and their bits with the sign on top, `shift` unused ones below. */
typedef struct {
    Floats value;
    Ints bits;
} Sixteen;

INLINE void load(const char *raw, int type, Sixteen *to)
{
    if (type == F32) {
        to->value = *(const Floats *)(const void *)raw;
        to->bits = (Ints)to->value;
        return;
    }
    to->bits = (Ints)(__builtin_convertvector(*(const Halves *)(const void *)raw, Words) << 16);
    to->value = (Floats)to->bits;
    if (type == F16) {
        Ints magnitude = (Ints)((Words)to->bits >> 3) & 0x0FFFE000;
        Ints special = (Ints)(magnitude >= 0x0F800000);
        /* The product moves the exponent to its new bias and makes subnormals normal. */
        Ints finite = (Ints)((Floats)magnitude * 0x1p112f), endless = magnitude | 0x7F800000;
        to->value = (Floats)(SELECT(special, endless, finite) | (to->bits & INT32_MIN));
    }
}

INLINE void add_lanes(const Sixteen *left, const Sixteen *right, Floats floor, int shift, Lanes *s)
{
    Floats a = left->value, b = right->value;
    Floats error = b - a, distance = MAGNITUDE(error), size = LARGER(MAGNITUDE(a), floor);
    Ints x = left->bits >> shift, y = right->bits >> shift, top = ((Ints){0} + INT32_MIN) >> shift;
    Ints x_rank = SELECT(x >> 31, top - x, x), y_rank = SELECT(y >> 31, top - y, y);
    Words ulps = (Words)SELECT((Ints)(x_rank > y_rank), x_rank - y_rank, y_rank - x_rank);
    s->equal -= (Ints)(a == b);
    s->greater -= (Ints)(error > 0.0f);
    s->less -= (Ints)(error < 0.0f);
    s->within_1e3 -= (Ints)(distance <= 1e-3f * size);
    s->within_5e3 -= (Ints)(distance <= 5e-3f * size);
    s->ulp_over -= (Ints)(ulps > ULP_LIMIT);
    s->error_squares += error * error;
    s->a_squares += a * a;
    s->b_squares += b * b;
    s->products += a * b;
    /* A distance may need all 32 bits, a conversion takes 31: half of it and the rest. */
    s->ulps += 2.0f * __builtin_convertvector((Ints)(ulps >> 1), Floats) +
               __builtin_convertvector((Ints)(ulps & 1), Floats);
    s->max_abs = LARGER(distance, s->max_abs);
    s->max_rel = LARGER(distance / size, s->max_rel);
    s->max_ulp = SELECT((Ints)(ulps > s->max_ulp), ulps, s->max_ulp);
    s->a_abs_max = LARGER(MAGNITUDE(a), s->a_abs_max);
    s->b_abs_max = LARGER(MAGNITUDE(b), s->b_abs_max);
}

INLINE void add_all(const char *a, const char *b, int n, int type, float floor, Lanes *s)
{
    int width = type == F32 ? 4 : 2;
    Floats lowest = (Floats){0} + floor;
    for (int i = 0; i < n * width; i += LANES * width) {
        Sixteen left, right;
        load(a + i, type, &left);
        load(b + i, type, &right);
        add_lanes(&left, &right, lowest, type == F32 ? 0 : 16, s);
    }
}

static double sum_floats(Floats v)
{
    double sum = 0.0;
    for (int i = 0; i < LANES; i++)
        sum += v[i];
    return sum;
}

static double sum_ints(Ints v)
{
    int64_t sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += v[i];
    return (double)sum;
}

static double largest(Floats v)
{
    double most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
}

/* Whether squares neither overflowed nor vanished; a NaN fails every comparison. */
static int is_sound(double squares, double most)
{
    return squares <= FLT_MAX && (squares >= 1e-30 || most == 0.0);
}

static int find_distance(const char *a, const char *b, int type, int n, float wanted)
{
    int width = type_width[type];
    for (int i = 0; i < n; i++) {
        uint64_t bits;
        float x = (float)as_double(a + i * width, type, &bits), y = (float)as_double(b + i * width, type, &bits);
        if (fabsf(y - x) == wanted)
            return i;
    }
    return 0;
}

/* Add a block of whole lanes; 0 when it has to be done slowly. */
WIDE static int add_block(const char *a, const char *b, int n, int64_t from, int type, float floor, double *out)
{
    Lanes s;
    memset(&s, 0, sizeof s);
    if (type == F32)
        add_all(a, b, n, F32, floor, &s);
    else if (type == F16)
        add_all(a, b, n, F16, floor, &s);
    else
        add_all(a, b, n, BF16, floor, &s);
    double error_squares = sum_floats(s.error_squares), a_squares = sum_floats(s.a_squares);
    double b_squares = sum_floats(s.b_squares), most = largest(s.max_abs);
    double a_most = largest(s.a_abs_max), b_most = largest(s.b_abs_max);
    if (!is_sound(error_squares, most) || !is_sound(a_squares, a_most) || !is_sound(b_squares, b_most))
        return 0;
    out[EQUAL] += sum_ints(s.equal);
    out[FINITE] += n;
    out[GREATER] += sum_ints(s.greater);
    out[LESS] += sum_ints(s.less);
    out[WITHIN_1E3] += sum_ints(s.within_1e3);
    out[WITHIN_5E3] += sum_ints(s.within_5e3);
    out[ULP_OVER] += sum_ints(s.ulp_over);
    out[ERROR_SQUARES] += error_squares;
    out[A_SQUARES] += a_squares;
    out[B_SQUARES] += b_squares;
    out[PRODUCTS] += sum_floats(s.products);
    out[ULPS] += sum_floats(s.ulps);
    double relative = largest(s.max_rel);
    out[MAX_REL] = relative > out[MAX_REL] ? relative : out[MAX_REL];
    for (int i = 0; i < LANES; i++)
        out[MAX_ULP] = s.max_ulp[i] > out[MAX_ULP] ? s.max_ulp[i] : out[MAX_ULP];
    out[A_ABS_MAX] = a_most > out[A_ABS_MAX] ? a_most : out[A_ABS_MAX];
    out[B_ABS_MAX] = b_most > out[B_ABS_MAX] ? b_most : out[B_ABS_MAX];
    if (most > out[MAX_ABS] || out[MAX_ABS_AT] < 0) {
        out[MAX_ABS] = most;
        out[MAX_ABS_AT] = (double)(from + find_distance(a, b, type, n, (float)most));
    }
    return 1;
}

static void measure_all(const char *a, const char *b, int type, int64_t count, double floor, double *out)
{
    int width = type_width[type], is_fast = type != F64 && floor >= FLT_MIN && floor <= FLT_MAX;
    for (int64_t at = 0; at < count; at += BLOCK) {
        int n = count - at < BLOCK ? (int)(count - at) : BLOCK, whole = is_fast ? n & ~(LANES - 1) : 0;
        const char *x = a + at * width, *y = b + at * width;
        if (whole && !add_block(x, y, whole, at, type, (float)floor, out))
            whole = 0;
        add_slowly(x + whole * width, y + whole * width, type, at + whole, n - whole, floor, out);
    }
}

static PyObject *measure(PyObject *module, PyObject *args)
{
    unsigned long long a, b, to;
    long long count;
    int type;
    double floor;
    (void)module;
    if (!PyArg_ParseTuple(args, "iKKLdK", &type, &a, &b, &count, &floor, &to))
        return NULL;
    if (type < 0 || type >= TYPES || count < 0) {
        PyErr_SetString(PyExc_ValueError, "unknown element type or negative count");
        return NULL;
    }
    double *out = (double *)(uintptr_t)to;
    memset(out, 0, SUMS * sizeof *out);
    out[COUNT] = (double)count;
    out[MAX_ABS_AT] = -1.0;
    Py_BEGIN_ALLOW_THREADS
    measure_all((const char *)(uintptr_t)a, (const char *)(uintptr_t)b, type, count, floor, out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"measure", measure, METH_VARARGS,
     "measure(type, a, b, count, floor, out)\n\nWrite the sums over two arrays at addresses a and b to address out."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_pair", "Sums over pairs of arrays, by address.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pair(void)
{
    return PyModule_Create(&definition);
}
