/* Histograms as few bytes, for the files of a run: which bins are filled, then their counts. clew.store.histogram tells
   the form, and has the twin of this.

   Includes nothing: it is a part of _kernel.c. */

static uint8_t *put_word(uint8_t *to, uint32_t word)
{
    to[0] = (uint8_t)word;
    to[1] = (uint8_t)(word >> 8);
    return to + 2;
}

/* Return where the next one goes. */
static uint8_t *pack_histogram(const uint32_t *counts, uint8_t *to)
{
    uint8_t *filled = to;
    uint32_t all = 0;
    memset(filled, 0, BINS / 8);
    to += BINS / 8;
    for (int i = 0; i < BINS; i++) {
        all |= counts[i];
        filled[i / 8] |= (uint8_t)((counts[i] != 0) << i % 8);
    }
    for (int i = 0; i < BINS; i++) {
        if (!counts[i])
            continue;
        to = put_word(to, counts[i]);
        if (all >> 16)
            to = put_word(to, counts[i] >> 16);
    }
    return to;
}

PyDoc_STRVAR(pack_histograms_doc, "pack_histograms(counts, rows, ends, packed)\n\n"
                                  "Pack rows of histograms that lie one after another, and write where each ends. All but the\n"
                                  "number of rows are addresses; of what is packed, there is room for the longest.");

static PyObject *pack_histograms(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 4))
        return NULL;
    const uint32_t *counts = as_address(args[0]);
    int64_t rows = PyLong_AsLongLong(args[1]), *ends = as_address(args[2]);
    uint8_t *start = as_address(args[3]), *to = start;
    if (PyErr_Occurred())
        return NULL;
    for (int64_t i = 0; i < rows; i++) {
        to = pack_histogram(counts + i * BINS, to);
        ends[i] = to - start;
    }
    Py_RETURN_NONE;
}
