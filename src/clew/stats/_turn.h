/* Rows of statistics as columns, for the files of a run: counts in 32 bits, other numbers as float32. clew.store.narrow
   tells the form, and has the twin of this.

   Includes nothing: it is a part of _kernel.c. */

enum { LEFT_OUT, A_COUNT, A_NUMBER };
enum { TURNED_ROWS = 64 }; /* so many rows stay in the first-level cache while each column takes its part of them */

/* Where columns go, each as long as all rows together; the largest of each kind of count is kept. */
typedef struct {
    const uint8_t *kinds;
    uint32_t *counts;
    float *numbers;
    double *largest;
    int64_t rows;
} Columns;

/* What is finite stays finite, and what is not zero stays not zero. */
static float narrow_number(double wide)
{
    float small = (float)wide;
    if (small == 0.0f && wide != 0.0)
        return copysignf(FLT_TRUE_MIN, small);
    if (fabsf(small) > FLT_MAX && fabs(wide) <= DBL_MAX)
        return copysignf(FLT_MAX, small);
    return small;
}

static void turn_counts(const double *row, int rows, uint32_t *to, double *largest)
{
    double most = *largest;
    for (int i = 0; i < rows; i++) {
        double count = row[i * STATS];
        most = count > most ? count : most;
        to[i] = count > 0.0 ? (uint32_t)(int64_t)count : 0; /* 0 of what a fault has left as NaN */
    }
    *largest = most;
}

static void turn_numbers(const double *row, int rows, float *to)
{
    int is_plain = 1;
    for (int i = 0; i < rows; i++) {
        double wide = row[i * STATS];
        to[i] = (float)wide;
        is_plain &= (fabs(wide) >= FLT_MIN) & (fabs(wide) < FLT_MAX);
    }
    for (int i = 0; !is_plain && i < rows; i++)
        to[i] = narrow_number(row[i * STATS]);
}

static void turn_some(const double *row, int rows, int64_t at, const Columns *columns)
{
    int64_t count = 0, number = 0;
    for (int stat = 0; stat < STATS; stat++) {
        if (columns->kinds[stat] == A_COUNT) {
            turn_counts(row + stat, rows, columns->counts + count * columns->rows + at, columns->largest + count);
            count++;
        } else if (columns->kinds[stat] == A_NUMBER) {
            turn_numbers(row + stat, rows, columns->numbers + number * columns->rows + at);
            number++;
        }
    }
}

/* Pieces are an address and a number of rows each. */
static void turn_pieces(const int64_t *pieces, int64_t n, const Columns *columns)
{
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        const double *row = (const double *)(uintptr_t)pieces[2 * i];
        for (int64_t left = pieces[2 * i + 1]; left > 0; left -= TURNED_ROWS) {
            int some = left < TURNED_ROWS ? (int)left : TURNED_ROWS;
            for (int line = 0; line < some * STATS * 8; line += LINE_BYTES)
                FETCH((const char *)(row + TURNED_ROWS * STATS) + line);
            turn_some(row, some, at, columns);
            row += (int64_t)some * STATS;
            at += some;
        }
    }
}

PyDoc_STRVAR(turn_rows_doc, "turn_rows(pieces, n, kinds, counts, numbers, largest, rows)\n\n"
                            "Write the columns of some pieces of rows, one piece after the other. `kinds` says of each\n"
                            "statistic whether it is left out (0), a count (1) or a number (2); all but it and the numbers\n"
                            "of pieces and rows are addresses.");

static PyObject *turn_rows(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 7))
        return NULL;
    const int64_t *pieces = as_address(args[0]);
    int64_t many = PyLong_AsLongLong(args[1]);
    Columns columns = {(const uint8_t *)PyBytes_AsString(args[2]), as_address(args[3]), as_address(args[4]),
                       as_address(args[5]), PyLong_AsLongLong(args[6])};
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    turn_pieces(pieces, many, &columns);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
