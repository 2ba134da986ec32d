/* Quick looks that every step takes, recorded or not: at a loss, at a few small gradients, at random states. Each is one
   call, since right after a step every line of Python has to come from far away.

   Includes nothing: it is a part of _kernel.c. */

static PyObject *str_grad, *str_grad_fn, *str_is_nested, *str_version, *str_f_back, *str_f_code, *str_f_lasti;

enum { IS_UNKNOWN = -2, IS_FINE = -1 };
enum { MAX_DEPTH = 5, MOST_PARTS = 64, END_BYTES = 128 };

static int intern_glance_names(void)
{
    return (str_grad = PyUnicode_InternFromString("grad")) &&
           (str_grad_fn = PyUnicode_InternFromString("grad_fn")) &&
           (str_is_nested = PyUnicode_InternFromString("is_nested")) &&
           (str_version = PyUnicode_InternFromString("_version")) &&
           (str_f_back = PyUnicode_InternFromString("f_back")) &&
           (str_f_code = PyUnicode_InternFromString("f_code")) &&
           (str_f_lasti = PyUnicode_InternFromString("f_lasti"));
}

static int append_number(PyObject *list, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    int failed = !number || PyList_Append(list, number) < 0;
    Py_XDECREF(number);
    return !failed;
}

/* -1 with an error set. */
static int64_t read_integer(PyObject *object, PyObject *name)
{
    PyObject *answer = PyObject_GetAttr(object, name);
    int64_t value = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return value;
}

/* A tensor of inference mode has no version and cannot be written to where it could be seen. */
static int64_t read_version(PyObject *tensor)
{
    int64_t version = read_integer(tensor, str_version);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return version;
}

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

static double read_element(const Task *task, int64_t at)
{
    switch (task->type) {
    case F32:
        return (double)((const float *)task->data)[at];
    case F64:
        return ((const double *)task->data)[at];
    case I64:
        return (double)((const int64_t *)task->data)[at];
    case I32:
        return (double)((const int32_t *)task->data)[at];
    default:
        return (double)((const uint8_t *)task->data)[at];
    }
}

/* Whether read_element knows the type. */
static int is_usual(const Task *task)
{
    return task->type == F32 || task->type == F64 || task->type == I64 || task->type == I32 || task->type == U8;
}

/* Whether a tensor is told simply: elements of a usual type, one after another. */
static int read_simple(PyObject *tensor, Task *task)
{
    return read_tensor(tensor, 0, task, NULL) && is_usual(task);
}

/* Read the integers that follow the first argument; 0 with an error set. */
static int parse_counts(PyObject *const *args, Py_ssize_t n, int count, int64_t *sizes)
{
    if (!check_count(n, count + 1))
        return 0;
    for (int i = 0; i < count; i++) {
        sizes[i] = PyLong_AsLongLong(args[i + 1]);
        if (PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* How far elements lie apart of which about so many are taken. */
static int64_t spread(int64_t count, int64_t most)
{
    return most > 0 && count / most > 1 ? count / most : 1;
}

static PyObject *read_object(const Task *task, int64_t at)
{
    return task->type == F32 || task->type == F64 ? PyFloat_FromDouble(read_element(task, at))
           : task->type == I64                    ? PyLong_FromLongLong(((const int64_t *)task->data)[at])
                                                  : PyLong_FromLongLong((int64_t)read_element(task, at));
}

/* Some numbers of a run of them, evenly spread. */
static PyObject *tell_numbers(const Task *task, int64_t first, int64_t count, int64_t most)
{
    int64_t apart = spread(count, most), size = (count + apart - 1) / apart;
    size = size < most ? size : most;
    PyObject *numbers = PyTuple_New((Py_ssize_t)size);
    for (int64_t i = 0; numbers && i < size; i++) {
        PyObject *number = read_object(task, first + i * apart);
        if (!number || PyTuple_SetItem(numbers, (Py_ssize_t)i, number) < 0)
            Py_CLEAR(numbers);
    }
    return numbers;
}

PyDoc_STRVAR(glance_doc, "glance(tensor, most) -> tuple | None\n\n"
                         "Return at most so many numbers of a tensor, evenly spread; None where it is not simply memory.");

static PyObject *glance(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Task task;
    int64_t most;
    (void)module;
    if (!parse_counts(args, n, 1, &most))
        return NULL;
    if (!read_simple(args[0], &task))
        Py_RETURN_NONE;
    return tell_numbers(&task, 0, task.count, most);
}

PyDoc_STRVAR(add_up_doc, "add_up(tensor, most) -> float | None\n\n"
                         "Return the sum of the magnitudes of up to twice so many numbers of a tensor, evenly spread; None\n"
                         "where it is not simply memory.");

static PyObject *add_up(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Task task;
    double sum = 0;
    int64_t most;
    (void)module;
    if (!parse_counts(args, n, 1, &most))
        return NULL;
    if (!read_simple(args[0], &task))
        Py_RETURN_NONE;
    int64_t apart = spread(task.count, most);
    for (int64_t i = 0; i < task.count; i += apart) {
        double value = read_element(&task, i);
        sum += value < 0 ? -value : value;
    }
    return PyFloat_FromDouble(sum);
}

static PyObject *copy_rows(const Task *task, int64_t rows, int64_t numbers)
{
    int64_t length = task->count / rows, apart = spread(length, numbers), size = (length + apart - 1) / apart;
    size = size < numbers ? size : numbers;
    int width = type_width[task->type];
    PyObject *memory = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * size * width));
    if (!memory)
        return NULL;
    char *to = PyBytes_AsString(memory);
    for (int64_t row = 0; row < rows; row++, to += size * width)
        copy_run(to, task->data + row * length * width, size, apart * width, width);
    return memory;
}

PyDoc_STRVAR(sample_rows_doc, "sample_rows(tensor, rows, numbers) -> bytes | None\n\n"
                              "Return the memory of up to so many numbers of each of the rows that a tensor is divided into,\n"
                              "evenly spread; None where it is not simply memory.");

static PyObject *sample_rows(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Task task;
    int64_t sizes[2]; /* rows, numbers of each */
    (void)module;
    if (!parse_counts(args, n, 2, sizes))
        return NULL;
    if (!read_simple(args[0], &task) || sizes[0] < 1 || sizes[1] < 1 || task.count % sizes[0])
        Py_RETURN_NONE;
    return copy_rows(&task, sizes[0], sizes[1]);
}

enum { IS_STRANGE = -1, IS_NOTHING = 0, IS_FOUND = 1 };

/* Find the first tensor whose rows are data: not computed, with enough numbers each. */
static int find_rows(PyObject *value, int64_t fewest, int depth, Task *task, int64_t *rows)
{
    Told told;
    if (value == Py_None || PyUnicode_Check(value) || PyLong_Check(value) || PyFloat_Check(value))
        return IS_NOTHING;
    if (is_plain_type(value)) {
        if (!read_tensor_told(value, 0, task, NULL, &told) || told.dims < 0)
            return IS_STRANGE;
        if (told.dims < 2 || !task->count || task->count / told.shape[0] < fewest)
            return IS_NOTHING;
        PyObject *node = PyObject_GetAttr(value, str_grad_fn);
        int is_data = node == Py_None;
        Py_XDECREF(node);
        *rows = told.shape[0];
        return !is_data ? IS_NOTHING : is_usual(task) ? IS_FOUND : IS_STRANGE;
    }
    int found = depth > MAX_DEPTH ? IS_STRANGE : IS_NOTHING;
    PyObject *part;
    Py_ssize_t at = 0, size = PyObject_Size(value);
    if (size < 0 || size > MOST_PARTS)
        found = IS_STRANGE;
    else if (PyDict_CheckExact(value))
        while (found == IS_NOTHING && PyDict_Next(value, &at, NULL, &part))
            found = find_rows(part, fewest, depth + 1, task, rows);
    else if (PyTuple_CheckExact(value) || PyList_CheckExact(value))
        for (; found == IS_NOTHING && at < size; at++) {
            part = PyTuple_CheckExact(value) ? PyTuple_GetItem(value, at) : PyList_GetItem(value, at);
            found = find_rows(part, fewest, depth + 1, task, rows);
        }
    else
        found = IS_STRANGE;
    PyErr_Clear();
    return found;
}

PyDoc_STRVAR(sample_first_doc, "sample_first(value, numbers, fewest) -> tuple | None\n\n"
                               "Return what ``sample_rows`` gives of the first tensor in a value whose rows are data, with how many\n"
                               "rows it has and the number of its type; None where something in the value is not plain, () where\n"
                               "there is no such tensor.");

static PyObject *sample_first(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Task task;
    int64_t rows = 0, sizes[2]; /* numbers of each row, the fewest that are enough */
    (void)module;
    if (!parse_counts(args, n, 2, sizes))
        return NULL;
    int found = is_observed() ? IS_STRANGE : find_rows(args[0], sizes[1], 0, &task, &rows);
    if (found == IS_STRANGE)
        Py_RETURN_NONE;
    if (found == IS_NOTHING)
        return PyTuple_New(0);
    PyObject *memory = copy_rows(&task, rows, sizes[0]);
    return memory ? Py_BuildValue("LNi", (long long)rows, memory, (int)task.type) : NULL;
}

PyDoc_STRVAR(find_place_doc, "find_place(frame, known, judge, frames, most) -> tuple\n\n"
                             "Return the identity and the place of the code of the innermost frames, so many of those that count\n"
                             "among so many; ``known`` keeps by identity what ``judge`` says of a code: whether it counts.");

static PyObject *find_place(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!check_count(n, 5))
        return NULL;
    long frames = PyLong_AsLong(args[3]), most = PyLong_AsLong(args[4]);
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0), *frame = args[0];
    Py_INCREF(frame);
    for (long i = 0; found && frame && frame != Py_None && i < most && PyList_Size(found) < 2 * frames; i++) {
        PyObject *code = PyObject_GetAttr(frame, str_f_code), *id = code ? PyLong_FromVoidPtr(code) : NULL;
        PyObject *counts = id ? PyDict_GetItemWithError(args[1], id) : NULL;
        Py_XINCREF(counts);
        if (id && !counts && !PyErr_Occurred()) {
            counts = PyObject_CallFunctionObjArgs(args[2], code, NULL);
            if (counts && PyDict_SetItem(args[1], id, counts) < 0)
                Py_CLEAR(counts);
        }
        PyObject *place = counts == Py_True ? PyObject_GetAttr(frame, str_f_lasti) : NULL;
        PyObject *back = counts ? PyObject_GetAttr(frame, str_f_back) : NULL;
        if (!back || (counts == Py_True && (!place || PyList_Append(found, id) < 0 || PyList_Append(found, place) < 0)))
            Py_CLEAR(found);
        Py_XDECREF(code);
        Py_XDECREF(id);
        Py_XDECREF(counts);
        Py_XDECREF(place);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyObject *all = found ? PyList_AsTuple(found) : NULL;
    Py_XDECREF(found);
    return all;
}

PyDoc_STRVAR(stamp_doc, "stamp(tensors) -> list\n\n"
                        "Return, for each tensor of a list, the identity and the version of its gradient; None without one.");

static PyObject *stamp(PyObject *module, PyObject *tensors)
{
    PyObject *stamps = PyList_New(0);
    (void)module;
    for (Py_ssize_t i = 0; stamps && i < PyList_Size(tensors); i++) {
        PyObject *gradient = PyObject_GetAttr(PyList_GetItem(tensors, i), str_grad), *entry = NULL;
        if (gradient == Py_None)
            entry = Py_NewRef(Py_None);
        else if (gradient)
            entry = Py_BuildValue("NL", PyLong_FromVoidPtr(gradient), (long long)read_version(gradient));
        if (!entry || PyList_Append(stamps, entry) < 0)
            Py_CLEAR(stamps);
        Py_XDECREF(entry);
        Py_XDECREF(gradient);
    }
    return stamps;
}

/* An exponent of nothing but ones, to which one is added, runs over into the sign: loops that any compiler makes vectors of. */
static int has_only_finite(const Task *task)
{
    uint32_t over = 0;
    uint64_t wide_over = 0;
    if (task->type == F32) {
        const uint32_t *bits = (const uint32_t *)(const void *)task->data;
        for (int64_t i = 0; i < task->count; i++)
            over |= (bits[i] & 0x7F800000u) + 0x00800000u;
    } else {
        const uint64_t *bits = (const uint64_t *)(const void *)task->data;
        for (int64_t i = 0; i < task->count; i++)
            wide_over |= (bits[i] & UINT64_C(0x7FF0000000000000)) + UINT64_C(0x0010000000000000);
    }
    return !(over >> 31) && !(wide_over >> 63);
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
    if (!task.layout && (task.type == F32 || task.type == F64))
        return has_only_finite(&task) ? IS_FINE : 0;
    run_tasks(&task, 1, &piece, 1);
    return piece.nan || piece.pos_inf || piece.neg_inf ? 0 : IS_FINE;
}

/* The position of the first that is bad, or IS_FINE, or IS_UNKNOWN, perhaps with an error set. */
static int judge_references(PyObject *references, int of_gradients)
{
    int found = is_observed() ? IS_UNKNOWN : IS_FINE;
    for (Py_ssize_t i = 0; found == IS_FINE && i < PyList_Size(references); i++) {
        PyObject *tensor = PyObject_CallObject(PyList_GetItem(references, i), NULL);
        if (tensor && tensor != Py_None && of_gradients) {
            PyObject *gradient = PyObject_GetAttr(tensor, str_grad);
            Py_DECREF(tensor);
            tensor = gradient;
        }
        if (!tensor)
            return IS_UNKNOWN;
        int judged = judge_tensor(tensor);
        found = judged ? judged : (int)i;
        Py_DECREF(tensor);
    }
    return found;
}

PyDoc_STRVAR(find_bad_doc, "find_bad(references, of_gradients) -> int\n\n"
                           "Return the position of the first weak reference to a tensor that has, or whose gradient has, a\n"
                           "NaN or an infinity, -1 if there is none. -2 if a tensor is not simply memory: nothing is known.");

static PyObject *find_bad(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!check_count(n, 2))
        return NULL;
    int found = judge_references(args[0], args[1] == Py_True);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(found);
}

/* Whether a tensor is told to have the type, the shape and the place of another. */
static int has_same_form(PyObject *tensor, PyObject *other)
{
    Told one, two;
    if (!is_plain_type(tensor) || !is_plain_type(other) || !is_told(tensor, &one) || !is_told(other, &two) ||
        one.code != two.code || one.bits != two.bits || one.dims != two.dims)
        return 0;
    return one.dims == 0 || memcmp(one.shape, two.shape, (size_t)one.dims * sizeof *one.shape) == 0;
}

/* Copy small buffers that are simply memory; 0 where one is not, or is not like its copy any more. */
static int copy_buffers(PyObject *pairs)
{
    Task from, to;
    for (Py_ssize_t i = 0; i < PyList_Size(pairs); i++) {
        PyObject *pair = PyList_GetItem(pairs, i), *buffer = PyTuple_GetItem(pair, 0), *copy = PyTuple_GetItem(pair, 1);
        if (!buffer || !copy || !has_same_form(buffer, copy) || !read_tensor(buffer, 0, &from, NULL) ||
            !read_tensor(copy, 0, &to, NULL) || count_bytes(&from) > FREE_BYTES)
            return 0;
        if (from.count)
            memcpy((char *)(uintptr_t)to.data, from.data, (size_t)count_bytes(&from));
    }
    return 1;
}

PyDoc_STRVAR(copy_buffers_doc, "copy_buffers(pairs) -> bool\n\n"
                               "Write tensors into their copies, each pair a tensor and its copy; False where one is large, not simply\n"
                               "memory, or not like its copy any more: the pairs before it are written.");

static PyObject *copy_buffers_in(PyObject *module, PyObject *pairs)
{
    (void)module;
    if (!PyList_Check(pairs)) {
        PyErr_SetString(PyExc_TypeError, "copy_buffers(list)");
        return NULL;
    }
    int done = copy_buffers(pairs);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

PyDoc_STRVAR(list_stale_doc, "list_stale(tensors, copies, versions) -> list\n\n"
                             "Return the positions of tensors that are not surely at this version and of the form of their copy.");

static PyObject *list_stale(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!check_count(n, 3))
        return NULL;
    int observed = is_observed();
    PyObject *stale = PyList_New(0);
    for (Py_ssize_t i = 0; stale && i < PyList_Size(args[0]); i++) {
        PyObject *tensor = PyList_GetItem(args[0], i), *copy = PyList_GetItem(args[1], i);
        PyObject *known = PyList_GetItem(args[2], i);
        int same = copy && known && !observed && read_version(tensor) == PyLong_AsLongLong(known) &&
                   has_same_form(tensor, copy);
        if (PyErr_Occurred() || (!same && !append_number(stale, i)))
            Py_CLEAR(stale);
    }
    return stale;
}

/* Whether an entry of an earlier list says the same of a frame. */
static int is_same_frame(PyObject *entry, PyObject *frame, PyObject *place, PyObject *code)
{
    return PyLong_AsVoidPtr(PyTuple_GetItem(entry, 0)) == (void *)frame && PyTuple_GetItem(entry, 2) == code &&
           PyLong_AsLong(PyTuple_GetItem(entry, 1)) == PyLong_AsLong(place);
}

/* Put a frame into the list at a position; what stands there and says the same stays. */
static int put_frame(PyObject *list, Py_ssize_t at, PyObject *frame)
{
    PyObject *place = PyObject_GetAttr(frame, str_f_lasti), *code = PyObject_GetAttr(frame, str_f_code);
    int has_entry = at < PyList_Size(list), fine = place && code;
    if (fine && !(has_entry && is_same_frame(PyList_GetItem(list, at), frame, place, code))) {
        PyObject *id = PyLong_FromVoidPtr(frame), *entry = id ? PyTuple_Pack(3, id, place, code) : NULL;
        Py_XDECREF(id);
        if (entry && has_entry)
            fine = PyList_SetItem(list, at, entry) == 0; /* takes the entry */
        else
            fine = entry && PyList_Append(list, entry) == 0;
        if (!has_entry)
            Py_XDECREF(entry);
    }
    Py_XDECREF(place);
    Py_XDECREF(code);
    return fine;
}

PyDoc_STRVAR(list_frames_doc, "list_frames(frame, list)\n\n"
                              "Make a list say of a frame and of each that called it: its identity, its place in its code, and\n"
                              "that. Step after step these are the same, and making them anew would cost most.");

static int put_frames(PyObject *frame, PyObject *list)
{
    Py_ssize_t count = 0;
    Py_INCREF(frame);
    while (frame && frame != Py_None) {
        PyObject *back = put_frame(list, count++, frame) ? PyObject_GetAttr(frame, str_f_back) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    int fine = frame && (PyList_Size(list) == count || PyList_SetSlice(list, count, PyList_Size(list), NULL) == 0);
    Py_XDECREF(frame);
    return fine;
}

static PyObject *list_frames(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!check_count(n, 2) || !put_frames(args[0], args[1]))
        return NULL;
    Py_RETURN_NONE;
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

static PyObject *take_rows(size_t count, const Target *from)
{
    PyObject *values = take_memory((char *)from->row, count * STATS * sizeof *from->row, 0xFF); /* all ones is a NaN */
    PyObject *hashes = take_memory((char *)from->hash, count * sizeof *from->hash, 0);
    PyObject *hists = take_memory((char *)from->hist, count * BINS * sizeof *from->hist, 0);
    PyObject *all = values && hashes && hists ? PyTuple_Pack(3, values, hashes, hists) : NULL;
    Py_XDECREF(values);
    Py_XDECREF(hashes);
    Py_XDECREF(hists);
    return all;
}

static PyObject *take(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Target from;
    (void)module;
    if (!check_count(n, 4) || !parse_target(args + 1, &from))
        return NULL;
    size_t count = PyLong_AsSize_t(args[0]);
    return PyErr_Occurred() ? NULL : take_rows(count, &from);
}

/* Whether the first or the last words differ: those of a Mersenne twister from which nothing was drawn do not. */
static int has_moved(const char *to, const char *from, size_t bytes)
{
    size_t end = bytes - END_BYTES;
    return bytes < 2 * END_BYTES || memcmp(to, from, END_BYTES) || memcmp(to + end, from + end, END_BYTES);
}

PyDoc_STRVAR(copy_memory_doc, "copy_memory(blocks)\n\n"
                              "Copy the states of random generators where numbers were drawn. Blocks are bytes: for each state,\n"
                              "as numbers of eight bytes, where to, where from and how many.");

static int copy_blocks(PyObject *packed)
{
    uint64_t block[3];
    char *blocks;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &blocks, &size) < 0)
        return 0;
    for (; size >= (Py_ssize_t)sizeof block; size -= sizeof block, blocks += sizeof block) {
        memcpy(block, blocks, sizeof block);
        char *to = (char *)(uintptr_t)block[0];
        const char *from = (const char *)(uintptr_t)block[1];
        if (has_moved(to, from, (size_t)block[2]))
            memcpy(to, from, (size_t)block[2]);
    }
    return 1;
}

PyDoc_STRVAR(has_same_copies_doc, "has_same_copies(blocks, others) -> bool\n\n"
                                  "Return whether two copies of the same states, given as to `copy_memory`, are equal.");

static PyObject *has_same_copies(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    char *one, *other;
    Py_ssize_t size, others;
    uint64_t a[3], b[3];
    (void)module;
    if (!check_count(n, 2) || PyBytes_AsStringAndSize(args[0], &one, &size) < 0 ||
        PyBytes_AsStringAndSize(args[1], &other, &others) < 0)
        return NULL;
    int same = size == others;
    for (Py_ssize_t at = 0; same && at + (Py_ssize_t)sizeof a <= size; at += sizeof a) {
        memcpy(a, one + at, sizeof a);
        memcpy(b, other + at, sizeof b);
        same = a[2] == b[2] && memcmp((void *)(uintptr_t)a[0], (void *)(uintptr_t)b[0], (size_t)a[2]) == 0;
    }
    return PyBool_FromLong(same);
}

static PyObject *copy_memory(PyObject *module, PyObject *packed)
{
    (void)module;
    if (!copy_blocks(packed))
        return NULL;
    Py_RETURN_NONE;
}
