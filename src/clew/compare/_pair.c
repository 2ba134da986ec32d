/* The sums of compare/metric.py over two flat arrays, in one pass.

   Plain loops that the compiler turns into vectors; where it offers that, clones for wider vectors are chosen at load
   time. In a block of BLOCK elements sums run in float32 lanes without asking whether a number is finite: a NaN, an
   infinity, an overflow or an underflow shows in the sums themselves, and only then the block is done again, one
   element at a time in double. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_bits.h"
#if defined(__unix__) || defined(__APPLE__)
#include "_mapped.h"
#define HAS_FILES
#endif

enum {
    COUNT, EQUAL, NONFINITE, FINITE, GREATER, LESS, WITHIN_1E3, WITHIN_5E3, ULP_OVER,
    ERROR_SQUARES, A_SQUARES, B_SQUARES, PRODUCTS, ULPS,
    MAX_ABS, MAX_ABS_AT, MAX_REL, MAX_ULP, A_ABS_MAX, B_ABS_MAX, SUMS
};
enum { BLOCK = 2048, ULP_LIMIT = 32 };

/* A block: its bits with the sign on top of 32, and the values of halves. */
typedef struct {
    float value[BLOCK];
    int32_t bits[BLOCK];
} Wide;

typedef struct {
    double error_squares, a_squares, b_squares, products, max_abs, a_abs_max, b_abs_max;
    int equal, greater, within_1e3, within_5e3, is_larger;
} Errors;

/* Two arrays of as many elements, each with its type. */
typedef struct {
    const char *a, *b;
    int a_type, b_type;
} Sides;

static void keep_largest(double value, double *most)
{
    *most = value > *most ? value : *most;
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
        keep_largest(fabs(x), &out[A_ABS_MAX]);
        keep_largest(fabs(y), &out[B_ABS_MAX]);
        keep_largest(distance > 0.0 ? distance / size : 0.0, &out[MAX_REL]);
        keep_largest(ulps, &out[MAX_ULP]);
        if (distance > out[MAX_ABS] || out[MAX_ABS_AT] < 0) {
            out[MAX_ABS] = distance;
            out[MAX_ABS_AT] = (double)(from + i);
        }
    }
}

/* Moves the exponent of a half to its place in a float and makes subnormals normal. */
WIDE static void rescale(const int32_t *bits, int n, float *to)
{
    union {
        int32_t bits[BLOCK];
        float value[BLOCK];
    } magnitude;
    for (int i = 0; i < n; i++)
        magnitude.bits[i] = bits[i] >> 3 & 0x0FFFE000;
    for (int i = 0; i < n; i++)
        magnitude.value[i] *= 0x1p112f;
    for (int i = 0; i < n; i++) {
        int32_t special = (bits[i] & 0x7C000000) == 0x7C000000 ? 0x7F800000 : 0;
        magnitude.bits[i] |= special | (bits[i] & INT32_MIN);
    }
    memcpy(to, magnitude.value, (size_t)n * sizeof *to);
}

WIDE static void widen(const void *raw, int type, int n, Wide *to)
{
    if (type == F32)
        memcpy(to->bits, raw, (size_t)n * sizeof *to->bits);
    else
        for (int i = 0; i < n; i++)
            to->bits[i] = (int32_t)((uint32_t)((const uint16_t *)raw)[i] << 16);
    if (type == F16)
        rescale(to->bits, n, to->value);
}

/* A float, or a bfloat16, which is the upper half of one; `type` is known where this is compiled. */
static inline float take(const void *from, int i, int type)
{
    if (type == F32)
        return ((const float *)from)[i];
    uint32_t word = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Everything but ULPs. `is_larger`: some relative error is beyond the largest one known, so it must be looked for. */
INLINE void sum_typed(const void *a, const void *b, int type, int n, float floor, float known, Errors *to)
{
    float errors = 0.0f, xs = 0.0f, ys = 0.0f, xys = 0.0f, most = 0.0f, x_most = 0.0f, y_most = 0.0f;
    int equal = 0, greater = 0, first = 0, second = 0, larger = 0;
    SIMD("omp simd reduction(+ : errors, xs, ys, xys, equal, greater, first, second) \
          reduction(max : most, x_most, y_most) reduction(| : larger)")
    for (int i = 0; i < n; i++) {
        float x = take(a, i, type), y = take(b, i, type), error = y - x;
        float distance = fabsf(error), x_size = fabsf(x), y_size = fabsf(y);
        float size = x_size > floor ? x_size : floor;
        errors += error * error;
        xs += x * x;
        ys += y * y;
        xys += x * y;
        most = distance > most ? distance : most;
        x_most = x_size > x_most ? x_size : x_most;
        y_most = y_size > y_most ? y_size : y_most;
        equal += x == y;
        greater += y > x;
        first += distance <= 1e-3f * size;
        second += distance <= 5e-3f * size;
        larger |= distance > known * size;
    }
    *to = (Errors){errors, xs, ys, xys, most, x_most, y_most, equal, greater, first, second, larger};
}

WIDE static void sum_errors(const void *a, const void *b, int type, int n, float floor, float known, Errors *to)
{
    if (type == F32)
        sum_typed(a, b, F32, n, floor, known, to);
    else
        sum_typed(a, b, BF16, n, floor, known, to);
}

INLINE void square_typed(const void *a, int type, int n, double *squares, double *most)
{
    float xs = 0.0f, x_most = 0.0f;
    SIMD("omp simd reduction(+ : xs) reduction(max : x_most)")
    for (int i = 0; i < n; i++) {
        float x = take(a, i, type), size = fabsf(x);
        xs += x * x;
        x_most = size > x_most ? size : x_most;
    }
    *squares = xs;
    *most = x_most;
}

WIDE static void sum_squares(const void *a, int type, int n, double *squares, double *most)
{
    if (type == F32)
        square_typed(a, F32, n, squares, most);
    else
        square_typed(a, BF16, n, squares, most);
}

WIDE static float find_relative(const void *a, const void *b, int type, int n, float floor)
{
    float most = 0.0f;
    for (int i = 0; i < n; i++) {
        float x = take(a, i, type), size = fabsf(x) > floor ? fabsf(x) : floor;
        float relative = fabsf(take(b, i, type) - x) / size;
        most = relative > most ? relative : most;
    }
    return most;
}

/* Ranks fit in 32 bits below and above zero, their distance in 32 without a sign. */
WIDE static void add_ulps(const int32_t *a, const int32_t *b, int n, int shift, double *out)
{
    uint32_t most = 0;
    double sum = 0.0;
    int over = 0;
    SIMD("omp simd reduction(+ : sum, over) reduction(max : most)")
    for (int i = 0; i < n; i++) {
        int32_t x = a[i] >> 31, y = b[i] >> 31;
        x = (((a[i] & INT32_MAX) >> shift) ^ x) - x;
        y = (((b[i] & INT32_MAX) >> shift) ^ y) - y;
        uint32_t ulps = (uint32_t)(x > y ? x : y) - (uint32_t)(x > y ? y : x);
        sum += ulps;
        over += ulps > ULP_LIMIT;
        most = ulps > most ? ulps : most;
    }
    out[ULPS] += sum;
    out[ULP_OVER] += over;
    keep_largest(most, &out[MAX_ULP]);
}

/* Whether squares neither overflowed nor vanished; a NaN fails every comparison. */
static int is_sound(double squares, double most)
{
    return squares <= FLT_MAX && (squares >= 1e-30 || most == 0.0);
}

static int find_distance(const void *a, const void *b, int type, int n, float wanted)
{
    int i = 0;
    while (i < n - 1 && fabsf(take(b, i, type) - take(a, i, type)) != wanted)
        i++;
    return i;
}

/* Add a block; 0 when it has to be done slowly. */
static int add_block(const void *a, const void *b, int type, int n, int64_t from, float floor, double *out)
{
    Errors s;
    sum_errors(a, b, type, n, floor, (float)out[MAX_REL], &s);
    if (!is_sound(s.error_squares, s.max_abs) || !is_sound(s.a_squares, s.a_abs_max) ||
        !is_sound(s.b_squares, s.b_abs_max))
        return 0;
    out[EQUAL] += s.equal;
    out[FINITE] += n;
    out[GREATER] += s.greater;
    out[LESS] += n - s.equal - s.greater;
    out[WITHIN_1E3] += s.within_1e3;
    out[WITHIN_5E3] += s.within_5e3;
    out[ERROR_SQUARES] += s.error_squares;
    out[A_SQUARES] += s.a_squares;
    out[B_SQUARES] += s.b_squares;
    out[PRODUCTS] += s.products;
    keep_largest(s.a_abs_max, &out[A_ABS_MAX]);
    keep_largest(s.b_abs_max, &out[B_ABS_MAX]);
    if (s.is_larger)
        keep_largest(find_relative(a, b, type, n, floor), &out[MAX_REL]);
    if (s.max_abs > out[MAX_ABS] || out[MAX_ABS_AT] < 0) {
        out[MAX_ABS] = s.max_abs;
        out[MAX_ABS_AT] = (double)(from + find_distance(a, b, type, n, (float)s.max_abs));
    }
    return 1;
}

static void to_floats(const char *raw, int type, int n, float *to)
{
    Wide wide;
    if (type == F32) {
        memcpy(to, raw, (size_t)n * sizeof *to);
        return;
    }
    widen(raw, type, n, &wide);
    memcpy(to, type == F16 ? (const void *)wide.value : (const void *)wide.bits, (size_t)n * sizeof *to);
}

/* A block that is the same on both sides, bit by bit; 0 when it has to be done slowly. */
static int add_same(const char *a, int type, int64_t from, int n, double *out)
{
    float values[BLOCK];
    const void *x = a;
    double squares, most;
    if (type == F16) {
        to_floats(a, F16, n, values);
        x = values;
    }
    sum_squares(x, type == BF16 ? BF16 : F32, n, &squares, &most);
    if (!is_sound(squares, most))
        return 0;
    out[EQUAL] += n;
    out[FINITE] += n;
    out[WITHIN_1E3] += n;
    out[WITHIN_5E3] += n;
    out[A_SQUARES] += squares;
    out[B_SQUARES] += squares;
    out[PRODUCTS] += squares;
    keep_largest(most, &out[A_ABS_MAX]);
    keep_largest(most, &out[B_ABS_MAX]);
    if (out[MAX_ABS_AT] < 0)
        out[MAX_ABS_AT] = (double)from;
    return 1;
}

static int add_fast(const char *a, const char *b, int type, int64_t from, int n, float floor, int ulps, double *out)
{
    Wide left, right;
    const void *x = a, *y = b;
    if (type == F16 || ulps) {
        widen(a, type, n, &left);
        widen(b, type, n, &right);
    }
    if (type == F16) {
        x = left.value;
        y = right.value;
    }
    if (!add_block(x, y, type == BF16 ? BF16 : F32, n, from, floor, out))
        return 0;
    if (ulps)
        add_ulps(left.bits, right.bits, n, type == F32 ? 0 : 16, out);
    return 1;
}

/* Two sides of different types: as floats, which hold every number of the narrower ones. */
static void add_mixed(Sides s, int64_t from, int n, double floor, double *out)
{
    float x[BLOCK], y[BLOCK];
    to_floats(s.a, s.a_type, n, x);
    to_floats(s.b, s.b_type, n, y);
    if (!add_block(x, y, F32, n, from, (float)floor, out))
        add_slowly((const char *)x, (const char *)y, F32, from, n, floor, out);
}

static void begin(int64_t count, double *out)
{
    memset(out, 0, SUMS * sizeof *out);
    out[COUNT] = (double)count;
    out[MAX_ABS_AT] = -1.0;
}

static void leave_out_ulps(double *out)
{
    out[ULPS] = out[ULP_OVER] = out[MAX_ULP] = NAN;
}

static void measure_all(Sides s, int64_t from, int64_t count, double floor, int ulps, double *out)
{
    int a_width = type_width[s.a_type], b_width = type_width[s.b_type];
    int is_fast = s.a_type != F64 && floor >= FLT_MIN && floor <= FLT_MAX;
    for (int64_t at = 0; at < count; at += BLOCK) {
        int n = count - at < BLOCK ? (int)(count - at) : BLOCK;
        const char *x = s.a + at * a_width, *y = s.b + at * b_width;
        if (s.a_type != s.b_type)
            add_mixed((Sides){x, y, s.a_type, s.b_type}, from + at, n, floor, out);
        else if (is_fast && !memcmp(x, y, (size_t)n * (size_t)a_width) && add_same(x, s.a_type, from + at, n, out))
            continue;
        else if (!is_fast || !add_fast(x, y, s.a_type, from + at, n, (float)floor, ulps, out))
            add_slowly(x, y, s.a_type, from + at, n, floor, out);
    }
}

static PyObject *measure(PyObject *module, PyObject *args)
{
    unsigned long long a, b, to;
    long long count;
    int type, ulps;
    double floor;
    (void)module;
    if (!PyArg_ParseTuple(args, "iKKLdpK", &type, &a, &b, &count, &floor, &ulps, &to))
        return NULL;
    if (type < 0 || type >= TYPES || count < 0) {
        PyErr_SetString(PyExc_ValueError, "unknown element type or negative count");
        return NULL;
    }
    double *out = (double *)(uintptr_t)to;
    Sides sides = {(const char *)(uintptr_t)a, (const char *)(uintptr_t)b, type, type};
    begin(count, out);
    Py_BEGIN_ALLOW_THREADS
    measure_all(sides, 0, count, floor, ulps, out);
    Py_END_ALLOW_THREADS
    if (!ulps)
        leave_out_ulps(out);
    Py_RETURN_NONE;
}

#ifdef HAS_FILES

/* The largest finite magnitude of a block that is not of double. */
static double find_scale(const char *raw, int type, int64_t count)
{
    float values[BLOCK], most = 0.0f;
    for (int64_t at = 0; at < count; at += BLOCK) {
        int n = count - at < BLOCK ? (int)(count - at) : BLOCK;
        to_floats(raw + at * type_width[type], type, n, values);
        for (int i = 0; i < n; i++) {
            float size = fabsf(values[i]);
            most = size > most && size <= FLT_MAX ? size : most;
        }
    }
    return most;
}

/* How to measure: what the first elements tell stands for all, a second reading would cost more than it gives. */
typedef struct {
    double small, ulp_range, floor;
    int ulps;
    double *out;
} Manner;

enum { FIRST = 1 << 16 };

static void measure_some(Sides s, int64_t from, int64_t n, Manner *how)
{
    if (from == 0) {
        double scale = find_scale(s.a, s.a_type, n < FIRST ? n : FIRST);
        how->floor = how->small * (scale > 0.0 ? scale : 1.0);
    }
    measure_all(s, from, n, how->floor, how->ulps, how->out);
    if (from == 0)
        how->ulps = how->ulps && sqrt(how->out[ERROR_SQUARES]) < how->ulp_range * sqrt(how->out[A_SQUARES]);
}

/* Both sides window by window, the first elements apart. */
static int measure_mapped(Window *a, Window *b, int a_type, int b_type, int64_t count, Manner *how)
{
    Sides s = {NULL, NULL, a_type, b_type};
    int a_width = type_width[a_type], b_width = type_width[b_type];
    for (int64_t at = 0; at < count;) {
        int64_t n = at == 0 && count > FIRST ? FIRST : count - at;
        s.a = look_at(a, at * a_width, &n, a_width);
        s.b = s.a ? look_at(b, at * b_width, &n, b_width) : NULL;
        if (!s.b)
            return 0;
        measure_some(s, at, n, how);
        at += n;
    }
    return 1;
}

/* 1 when all was measured, 0 for an error of the system (errno), -1 when a file ended or broke under its map. */
static int measure_guarded(Window *a, Window *b, int a_type, int b_type, int64_t count, Manner *how)
{
    int done = -1;
    begin_guard();
    if (!sigsetjmp(guard.place, 1)) {
        guard.is_on = 1;
        done = measure_mapped(a, b, a_type, b_type, count, how);
    }
    guard.is_on = 0;
    end_guard();
    drop_window(a);
    drop_window(b);
    return done;
}

static PyObject *measure_files(PyObject *module, PyObject *args)
{
    Window a = {0}, b = {0};
    long long count, a_at, b_at;
    unsigned long long to;
    Manner how = {0};
    int a_type, b_type, done;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiLiiLLddK", &a_type, &a.file, &a_at, &b_type, &b.file, &b_at, &count, &how.small,
                          &how.ulp_range, &to))
        return NULL;
    if (a_type < 0 || a_type >= TYPES || b_type < 0 || b_type >= TYPES || a_type == F64 || b_type == F64 || count < 0 ||
        a_at % type_width[a_type] || b_at % type_width[b_type]) {
        PyErr_SetString(PyExc_ValueError, "unknown element type, negative count, or a place between two elements");
        return NULL;
    }
    how.out = (double *)(uintptr_t)to;
    how.ulps = a_type == b_type;
    begin(count, how.out);
    open_window(&a, a_at, count * type_width[a_type]);
    open_window(&b, b_at, count * type_width[b_type]);
    Py_BEGIN_ALLOW_THREADS
    done = measure_guarded(&a, &b, a_type, b_type, count, &how);
    Py_END_ALLOW_THREADS
    if (!how.ulps)
        leave_out_ulps(how.out);
    if (done < 0 && is_short(&a))
        return PyLong_FromLong(1);
    if (done < 0 && is_short(&b))
        return PyLong_FromLong(2);
    if (done < 0)
        errno = EIO;
    return done > 0 ? PyLong_FromLong(0) : PyErr_SetFromErrno(PyExc_OSError);
}

#endif

static PyObject *count_denormals(PyObject *module, PyObject *args)
{
    unsigned long long address, smallest;
    long long count, tiny = 0;
    int width;
    (void)module;
    if (!PyArg_ParseTuple(args, "KiLK", &address, &width, &count, &smallest))
        return NULL;
    if (width != 2 && width != 4 && width != 8) {
        PyErr_SetString(PyExc_ValueError, "elements of 2, 4 or 8 bytes");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (long long at = 0; at < count; at += BLOCK)
        tiny += count_tiny((const char *)(uintptr_t)address + at * width, width,
                           count - at < BLOCK ? (int)(count - at) : BLOCK, smallest);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(tiny);
}

static PyMethodDef methods[] = {
    {"measure", measure, METH_VARARGS,
     "measure(type, a, b, count, floor, ulps, out)\n\n"
     "Write the sums over two arrays at addresses a and b to address out; ULPs are NaN unless asked for."},
#ifdef HAS_FILES
    {"measure_files", measure_files, METH_VARARGS,
     "measure_files(type_a, file_a, offset_a, type_b, file_b, offset_b, count, small, ulp_range, out)\n\n"
     "Write the sums over two arrays in open files to address out, reading each once. Return 0, or 1 or 2 when the\n"
     "first or the second file ends too early. ULPs are NaN where the first block is further apart than ulp_range."},
#endif
    {"count_denormals", count_denormals, METH_VARARGS,
     "count_denormals(address, width, count, smallest)\n\n"
     "Count floats of a width in bytes whose bits, without the sign, are above 0 and below `smallest`."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_pair", "Sums over pairs of arrays, by address.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pair(void)
{
    return PyModule_Create(&definition);
}
