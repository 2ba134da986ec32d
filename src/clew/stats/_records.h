/* What becomes of the rows of a step once it has ended, and what a snapshot looks for. The twins are in capture/draft.py
   and capture/torch/snapshot_names.py.

   Includes nothing: it is a part of _kernel.c. */

/* ---------------------------------------------------------------- a record */

static int copy_row(PyObject *part, size_t width, Py_ssize_t row, Py_ssize_t earlier)
{
    if (part == Py_None)
        return 1;
    Py_ssize_t rows = PyByteArray_Check(part) ? PyByteArray_Size(part) / (Py_ssize_t)width : 0;
    if (row < 0 || earlier < 0 || row >= rows || earlier >= rows) {
        PyErr_SetString(PyExc_IndexError, "no such row");
        return 0;
    }
    char *memory = PyByteArray_AsString(part);
    memcpy(memory + (size_t)row * width, memory + (size_t)earlier * width, width);
    return 1;
}

static int copy_rows_of(PyObject *const *parts, PyObject *copies)
{
    static const size_t width[] = {STATS * sizeof(double), sizeof(uint64_t), BINS * sizeof(uint32_t)};
    int done = 1;
    for (Py_ssize_t i = 0; done && i < PyList_Size(copies); i++) {
        PyObject *pair = PyList_GetItem(copies, i);
        Py_ssize_t row = PyLong_AsSsize_t(PyTuple_GetItem(pair, 0)), earlier = PyLong_AsSsize_t(PyTuple_GetItem(pair, 1));
        for (int part = 0; done && part < 3; part++)
            done = copy_row(parts[part], width[part], row, earlier);
    }
    return done && !PyErr_Occurred();
}

static int has_bad_rows(const double *values, Py_ssize_t rows)
{
    double bad = 0.0;
    for (Py_ssize_t i = 0; i < rows; i++)
        bad += fabs(values[i * STATS + 1]) + fabs(values[i * STATS + 2]) + fabs(values[i * STATS + 3]);
    return !(bad == 0.0);
}

PyDoc_STRVAR(settle_doc, "settle(values, hashes, hists, copies, chosen, count) -> (bool, list)\n\n"
                         "Give rows what earlier ones have, each copy a pair of a row and the earlier one; return whether a row has a\n"
                         "NaN or an infinity, and the norms of some rows, whose numbers lie at an address.");

static PyObject *settle(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 6) || !PyByteArray_Check(args[0]) || !PyList_Check(args[3]) || !copy_rows_of(args, args[3])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "settle(values, hashes, hists, copies, chosen, count)");
        return NULL;
    }
    const double *values = (const double *)PyByteArray_AsString(args[0]);
    Py_ssize_t rows = PyByteArray_Size(args[0]) / (Py_ssize_t)(STATS * sizeof(double)), count = PyLong_AsSsize_t(args[5]);
    const intptr_t *chosen = as_address(args[4]);
    PyObject *norms = PyErr_Occurred() ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; norms && i < count; i++) {
        PyObject *norm = chosen[i] >= 0 && chosen[i] < rows ? PyFloat_FromDouble(values[chosen[i] * STATS + STATS - 1]) : NULL;
        if (!norm || PyList_Append(norms, norm) < 0)
            Py_CLEAR(norms);
        Py_XDECREF(norm);
    }
    if (!norms && !PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "no such row");
    return norms ? Py_BuildValue("(NN)", PyBool_FromLong(has_bad_rows(values, rows)), norms) : NULL;
}

/* ---------------------------------------------------------------- what lives */

PyDoc_STRVAR(list_of_type_doc, "list_of_type(things, type) -> list\n\nReturn the things of a list that are of this very type.");

static PyObject *list_of_type(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 2))
        return NULL;
    Py_ssize_t count = PyList_Size(args[0]);
    PyObject *found = count < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        PyObject *thing = PyList_GetItem(args[0], i);
        if ((PyObject *)Py_TYPE(thing) == args[1] && PyList_Append(found, thing) < 0)
            Py_CLEAR(found);
    }
    return found;
}
