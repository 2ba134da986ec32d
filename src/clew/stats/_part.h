/* Quick looks at a part of a tensor, and at labels: one call instead of a few of torch's, each of which makes a tensor.

   Includes nothing: it is a part of _kernel.c. */

enum { LOWEST_LABEL = -128, LABELS = 1280 };

PyDoc_STRVAR(glance_row_doc, "glance_row(tensor, row, most) -> tuple | None\n\n"
                             "Return what ``glance`` gives of a row of a tensor, from its end where that is negative; None where\n"
                             "there is no such row, or the tensor is not simply memory.");

static PyObject *glance_row(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Task task;
    Told told;
    int64_t sizes[2]; /* which row, numbers of it */
    (void)module;
    if (!parse_counts(args, n, 2, sizes))
        return NULL;
    if (!read_tensor_told(args[0], 0, &task, NULL, &told) || !is_usual(&task) || told.dims < 1)
        Py_RETURN_NONE;
    int64_t rows = told.shape[0], row = sizes[0] < 0 ? sizes[0] + rows : sizes[0];
    if (row < 0 || row >= rows)
        Py_RETURN_NONE;
    int64_t length = task.count / rows;
    return tell_numbers(&task, row * length, length, sizes[1]);
}

PyDoc_STRVAR(count_zeros_doc, "count_zeros(tensor, first) -> int | None\n\n"
                              "Return how many of the first so many numbers of a tensor are zero; None where it is not simply memory.");

static PyObject *count_zeros(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Task task;
    int64_t first, zeros = 0;
    (void)module;
    if (!parse_counts(args, n, 1, &first))
        return NULL;
    if (!read_simple(args[0], &task))
        Py_RETURN_NONE;
    for (int64_t i = 0; i < first && i < task.count; i++)
        zeros += read_element(&task, i) == 0;
    return PyLong_FromLongLong(zeros);
}

/* Whether all labels of a tensor could be counted. */
static int add_labels(PyObject *tensor, int32_t *counts)
{
    Task task;
    if (!read_simple(tensor, &task) || (task.type != I64 && task.type != I32 && task.type != U8))
        return 0;
    for (int64_t i = 0; i < task.count; i++) {
        int64_t label = task.type == I64 ? ((const int64_t *)task.data)[i] : (int64_t)read_element(&task, i);
        if (label < LOWEST_LABEL || label >= LOWEST_LABEL + LABELS)
            return 0;
        counts[label - LOWEST_LABEL]++;
    }
    return 1;
}

PyDoc_STRVAR(count_labels_doc, "count_labels(tensors) -> dict | None\n\n"
                               "Return how often each number is in a list of tensors of whole numbers; None where one is not simply\n"
                               "memory, or a number is no usual label.");

static PyObject *count_labels(PyObject *module, PyObject *tensors)
{
    int32_t counts[LABELS] = {0};
    (void)module;
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++)
        if (!add_labels(PyList_GetItem(tensors, i), counts))
            Py_RETURN_NONE;
    PyObject *found = PyDict_New();
    for (int i = 0; found && i < LABELS; i++) {
        if (!counts[i])
            continue;
        PyObject *label = PyLong_FromLong(i + LOWEST_LABEL), *count = PyLong_FromLong(counts[i]);
        if (!label || !count || PyDict_SetItem(found, label, count) < 0)
            Py_CLEAR(found);
        Py_XDECREF(label);
        Py_XDECREF(count);
    }
    return found;
}

/* Whether all that is in a value could be told: tensors go into the list. */
static int add_leaves(PyObject *value, PyObject *leaves, int depth)
{
    if (value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
        PyBool_Check(value))
        return 1;
    if (is_plain_type(value)) {
        PyObject *nested = PyObject_GetAttr(value, str_is_nested);
        int fine = nested == Py_False && PyList_Append(leaves, value) == 0;
        Py_XDECREF(nested);
        return fine;
    }
    int is_tuple = PyTuple_CheckExact(value), is_list = PyList_CheckExact(value), is_dict = PyDict_CheckExact(value);
    if (depth > MAX_DEPTH || !(is_tuple || is_list || is_dict))
        return 0;
    PyObject *part;
    Py_ssize_t at = 0, size = PyObject_Size(value);
    int fine = size <= MOST_PARTS;
    if (is_dict)
        while (fine && PyDict_Next(value, &at, NULL, &part))
            fine = add_leaves(part, leaves, depth + 1);
    for (; !is_dict && fine && at < size; at++) {
        part = is_tuple ? PyTuple_GetItem(value, at) : PyList_GetItem(value, at);
        fine = part && add_leaves(part, leaves, depth + 1);
    }
    return fine;
}

PyDoc_STRVAR(list_leaves_doc, "list_leaves(value) -> list | None\n\n"
                              "Return the tensors inside tuples, lists and dicts, in order; None where something else is inside.");

static PyObject *list_leaves(PyObject *module, PyObject *value)
{
    (void)module;
    PyObject *leaves = PyList_New(0);
    if (leaves && add_leaves(value, leaves, 0))
        return leaves;
    Py_XDECREF(leaves);
    PyErr_Clear();
    Py_RETURN_NONE;
}
