/* Rectangles with columns as rows, for the parts of a run: clew.store.arrange says which, and has the twin of this.

   Includes nothing: it is a part of _kernel.c. */

enum { TILE = 16 }; /* so many lines of memory, and those they are written to, stay in the first-level cache */

#ifdef HAVE_X86
/* Four by four elements of 32 bits. */
static INLINED void load_square(const uint32_t *from, int64_t row, __m128i turned[4])
{
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + row));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 2 * row));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 3 * row));
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
    turned[0] = _mm_unpacklo_epi64(ab, cd);
    turned[1] = _mm_unpackhi_epi64(ab, cd);
    turned[2] = _mm_unpacklo_epi64(ab_high, cd_high);
    turned[3] = _mm_unpackhi_epi64(ab_high, cd_high);
}

static INLINED int turn_square_32(const uint32_t *from, int64_t row, uint32_t *to, int64_t to_row)
{
    __m128i turned[4];
    load_square(from, row, turned);
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128((__m128i *)(to + i * to_row), turned[i]);
    return 1;
}

static INLINED int turn_square_wide(const uint32_t *from, int64_t row, uint64_t *to, int64_t to_row)
{
    __m128i turned[4], zero = _mm_setzero_si128();
    load_square(from, row, turned);
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(to + i * to_row), _mm_unpacklo_epi32(turned[i], zero));
        _mm_storeu_si128((__m128i *)(to + i * to_row) + 1, _mm_unpackhi_epi32(turned[i], zero));
    }
    return 1;
}
#else
#define turn_square_32(from, row, to, to_row) 0
#define turn_square_wide(from, row, to, to_row) 0
#endif
#define turn_square_8(from, row, to, to_row) 0
#define turn_square_16(from, row, to, to_row) 0
#define turn_square_64(from, row, to, to_row) 0

/* One tile, four by four elements at a time as far as they go and there is a way to. */
#define TURN_TILE(name, narrow, wide)                                                                                  \
    static INLINED void turn_tile_##name(const narrow *from, int64_t row, int rows, int columns, wide *to,             \
                                         int64_t to_row)                                                               \
    {                                                                                                                  \
        for (int y = 0; y < columns; y += 4)                                                                           \
            for (int x = 0; x < rows; x += 4) {                                                                        \
                const narrow *corner = from + x * row + y;                                                             \
                wide *target = to + y * to_row + x;                                                                    \
                if (x + 4 <= rows && y + 4 <= columns && turn_square_##name(corner, row, target, to_row))              \
                    continue;                                                                                          \
                for (int j = 0; j < 4 && y + j < columns; j++)                                                         \
                    for (int i = 0; i < 4 && x + i < rows; i++)                                                        \
                        target[j * to_row + i] = corner[i * row + j];                                                  \
            }                                                                                                          \
    }

/* Rectangles that lie one below the other, each an address and a number of rows. */
#define TURN_OVER(name, narrow, wide)                                                                                  \
    TURN_TILE(name, narrow, wide)                                                                                      \
    static void turn_over_##name(const int64_t *pieces, int64_t n, int64_t row, int64_t columns, wide *to,             \
                                 int64_t to_row)                                                                       \
    {                                                                                                                  \
        for (int64_t piece = 0; piece < n; to += pieces[2 * piece + 1], piece++) {                                     \
            const narrow *from = (const narrow *)(uintptr_t)pieces[2 * piece];                                         \
            int64_t rows = pieces[2 * piece + 1];                                                                      \
            for (int64_t i = 0; i < rows; i += TILE)                                                                   \
                for (int64_t j = 0; j < columns; j += TILE) {                                                          \
                    const narrow *corner = from + i * row + j;                                                         \
                    for (int x = TILE; x < 2 * TILE; x++)                                                              \
                        FETCH((const char *)corner + x * row * (int64_t)sizeof(narrow));                               \
                    int high = rows - i < TILE ? (int)(rows - i) : TILE;                                               \
                    int broad = columns - j < TILE ? (int)(columns - j) : TILE;                                        \
                    turn_tile_##name(corner, row, high, broad, to + j * to_row + i, to_row);                           \
                }                                                                                                      \
        }                                                                                                              \
    }

TURN_OVER(8, uint8_t, uint8_t)
TURN_OVER(16, uint16_t, uint16_t)
TURN_OVER(32, uint32_t, uint32_t)
TURN_OVER(64, uint64_t, uint64_t)
TURN_OVER(wide, uint32_t, uint64_t)

PyDoc_STRVAR(turn_over_doc, "turn_over(width, to_width, pieces, n, row, columns, to, to_row)\n\n"
                            "Write the columns of some pieces of rows as rows. Elements have 1, 2, 4 or 8 bytes, and those\n"
                            "without a sign of 4 bytes may become 8; `pieces` and `to` are addresses, `row` and `to_row`\n"
                            "say how many elements lie between two rows.");

static PyObject *turn_over(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 8))
        return NULL;
    long width = PyLong_AsLong(args[0]), to_width = PyLong_AsLong(args[1]);
    const int64_t *pieces = as_address(args[2]);
    int64_t many = PyLong_AsLongLong(args[3]), row = PyLong_AsLongLong(args[4]), columns = PyLong_AsLongLong(args[5]);
    void *to = as_address(args[6]);
    int64_t to_row = PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (width < to_width)
        turn_over_wide(pieces, many, row, columns, to, to_row);
    else if (width == 1)
        turn_over_8(pieces, many, row, columns, to, to_row);
    else if (width == 2)
        turn_over_16(pieces, many, row, columns, to, to_row);
    else if (width == 4)
        turn_over_32(pieces, many, row, columns, to, to_row);
    else
        turn_over_64(pieces, many, row, columns, to, to_row);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
