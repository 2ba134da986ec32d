/* Quick looks that every step takes, recorded or not: at a loss, at a few small gradients, at random states. Each is one
   call, since right after a step every line of Python has to come from far away.

   Includes nothing: it is a part of _kernel.c. */

static PyObject *str_grad;

enum { IS_UNKNOWN = -2, IS_FINE = -1 };

PyDoc_STRVAR(read_number_doc, "read_number(tensor) -> float | None\n\n"
                              "Return the number that a tensor of one element holds, if that is simply a float in memory.");

static PyObject *read_number(PyObject *module, PyObject *tensor)
{
    (void)module;
    Task task;
    if (!read_tensor(tensor, 0, &task, NULL) || (task.type != F32 && task.type != F64) || task.count != 1)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(task.type == F32 ? (double)*(const float *)task.data : *(const double *)task.data);
}

/* IS_FINE also where there is nothing to look at. */
static int judge_tensor(PyObject *tensor)
{
    Layout layout;
    Task task;
    Piece piece;
    if (tensor == Py_None)
        return IS_FINE;
    if (!read_tensor(tensor, WANT_STATS, &task, &layout))
        return IS_UNKNOWN;
    run_tasks(&task, 1, &piece, 1);
    return piece.nan || piece.pos_inf || piece.neg_inf ? 0 : IS_FINE;
}

PyDoc_STRVAR(find_bad_doc, "find_bad(references, of_gradients) -> int\n\n"
                           "Return the position of the first weak reference to a tensor that has, or whose gradient has, a\n"
                           "NaN or an infinity, -1 if there is none. -2 if a tensor is not simply memory: nothing is known.");

static PyObject *find_bad(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!check_count(n, 2))
        return NULL;
    int of_gradients = args[1] == Py_True, found = is_observed() ? IS_UNKNOWN : IS_FINE;
    for (Py_ssize_t i = 0; found == IS_FINE && i < PyList_Size(args[0]); i++) {
        PyObject *tensor = PyObject_CallObject(PyList_GetItem(args[0], i), NULL);
        if (tensor && tensor != Py_None && of_gradients) {
            PyObject *gradient = PyObject_GetAttr(tensor, str_grad);
            Py_DECREF(tensor);
            tensor = gradient;
        }
        if (!tensor)
            return NULL;
        int judged = judge_tensor(tensor);
        found = judged ? judged : (int)i;
        Py_DECREF(tensor);
    }
    return PyLong_FromLong(found);
}

static PyObject *take_memory(char *from, size_t bytes, int fill)
{
    PyObject *taken = from ? PyByteArray_FromStringAndSize(from, (Py_ssize_t)bytes) : Py_None;
    if (taken == Py_None)
        Py_INCREF(taken);
    if (taken && from)
        memset(from, fill, bytes);
    return taken;
}

PyDoc_STRVAR(take_doc, "take(count, row, hash, hist) -> tuple\n\n"
                       "Return the first rows at these addresses as bytearrays, None for what is not kept, and empty the rows:\n"
                       "values become NaN, the rest 0.");

static PyObject *take(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Target from;
    (void)module;
    if (!check_count(n, 4) || !parse_target(args + 1, &from))
        return NULL;
    size_t count = PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *values = take_memory((char *)from.row, count * STATS * sizeof *from.row, 0xFF); /* all ones is a NaN */
    PyObject *hashes = take_memory((char *)from.hash, count * sizeof *from.hash, 0);
    PyObject *hists = take_memory((char *)from.hist, count * BINS * sizeof *from.hist, 0);
    PyObject *all = values && hashes && hists ? PyTuple_Pack(3, values, hashes, hists) : NULL;
    Py_XDECREF(values);
    Py_XDECREF(hashes);
    Py_XDECREF(hists);
    return all;
}

PyDoc_STRVAR(copy_memory_doc, "copy_memory(to, from, bytes, ...)\n\n"
                              "Copy some stretches of memory, given by three integers each.");

static PyObject *copy_memory(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    for (Py_ssize_t i = 0; i + 2 < n; i += 3) {
        void *to = as_address(args[i]), *from = as_address(args[i + 1]);
        size_t bytes = PyLong_AsSize_t(args[i + 2]);
        if (PyErr_Occurred())
            return NULL;
        memcpy(to, from, bytes);
    }
    Py_RETURN_NONE;
}
