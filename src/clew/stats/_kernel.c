/* The Python face of the kernel: reads what a tensor says of itself, measures its memory, writes rows by address.
   No header of torch is needed: a tensor is described by the exchange table of DLPack, and where torch has none, asked for
   dtype, address and size by the methods it has in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_clock.h"
#include "_tasks.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#define process_id() ((long)getpid())
#else
#define process_id() 0L
#endif

enum { MAX_TYPES = 8, MAX_DTYPES = 32, QUESTIONS = 10 };
enum { THREAD_BYTES = 4 << 20, FREE_BYTES = 1 << 20 }; /* from where threads, and letting other Python threads run, pay */

#define FAST(name, function, doc) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, doc}

/* What `configure` was told about torch. */
static PyObject *plain_type[MAX_TYPES];
static PyObject *dtype_object[MAX_DTYPES];
static int dtype_code[MAX_DTYPES];
static Py_ssize_t plain_types, dtypes;
static PyObject *ask_data_ptr, *ask_numel, *ask_contiguous, *ask_stride, *ask_neg, *ask_offset, *ask_mode,
    *ask_threads, *ask_grad, *ask_storage;
static PyObject *str_dtype, *str_is_cpu, *str_is_nested, *str_shape;
static long home_process;

#include "_ask.h"
#include "_exchange.h"

/* Where the row of the first tensor goes; hash and hist may be NULL. */
typedef struct {
    double *row;
    uint64_t *hash;
    uint32_t *hist;
} Target;

static void *as_address(PyObject *number)
{
    return (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
}

static int parse_target(PyObject *const *args, Target *target)
{
    target->row = as_address(args[0]);
    target->hash = as_address(args[1]);
    target->hist = as_address(args[2]);
    return PyErr_Occurred() == NULL;
}

static int count_wants(const Target *target)
{
    return WANT_STATS | (target->hash ? WANT_HASH : 0) | (target->hist ? WANT_HIST : 0);
}

static void write_target(const Piece *p, const Task *task, const Target *target, int64_t i)
{
    write_row(p, target->row + i * STATS);
    if (target->hash)
        target->hash[i] = finish_hash(p->hash, task->count, type_width[task->measured]);
    if (target->hist)
        memcpy(target->hist + i * BINS, p->hist, sizeof p->hist);
}

static int is_plain_type(PyObject *tensor)
{
    for (Py_ssize_t i = 0; i < plain_types; i++)
        if ((PyObject *)Py_TYPE(tensor) == plain_type[i])
            return 1;
    return 0;
}

static int parse_sizes(PyObject *tuple, int64_t scale, int64_t *to)
{
    Py_ssize_t dims = tuple ? PyTuple_Size(tuple) : -1;
    if (dims > MAX_DIMS)
        return -1;
    for (Py_ssize_t i = 0; i < dims; i++)
        to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i)) * scale;
    return PyErr_Occurred() ? -1 : (int)dims;
}

static int read_layout(PyObject *tensor, int width, Layout *layout)
{
    PyObject *shape = PyObject_GetAttr(tensor, str_shape);
    PyObject *strides = shape ? PyObject_CallFunctionObjArgs(ask_stride, tensor, NULL) : NULL;
    layout->dims = parse_sizes(shape, 1, layout->size);
    int same = layout->dims >= 0 && parse_sizes(strides, width, layout->stride) == layout->dims;
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return same;
}

/* A negative view shows one part of complex numbers, so it has gaps unless it has one element. */
static int may_be_negative(const Task *task, int contiguous)
{
    return !contiguous || task->count == 1;
}

/* As read_tensor, by asking the tensor itself. */
static int ask_tensor(PyObject *tensor, Task *task, Layout *layout)
{
    if (is_observed() || (was_refused && !ask_truth(ask_storage, tensor)))
        return 0;
    task->type = task->measured = find_dtype(tensor);
    if (task->type < 0 || !read_flag(tensor, str_is_cpu))
        return 0;
    int contiguous = ask_truth(ask_contiguous, tensor);
    if (!contiguous && !layout)
        return 0;
    task->count = ask_integer(ask_numel, tensor);
    task->data = (const char *)(uintptr_t)ask_integer(ask_data_ptr, tensor);
    if (PyErr_Occurred()) {
        was_refused = 1;
        return 0;
    }
    if (task->count && !task->data)
        return 0;
    if (may_be_negative(task, contiguous) && ask_truth(ask_neg, tensor))
        return 0;
    task->layout = contiguous ? NULL : layout;
    return contiguous || read_layout(tensor, type_width[task->type], layout);
}

/* As read_tensor, from what torch told. */
static int read_told(PyObject *tensor, const Told *told, Task *task, Layout *layout)
{
    task->type = task->measured = find_told_type(told);
    int contiguous = is_told_contiguous(told, &task->count);
    task->data = told->data;
    if ((!contiguous && !layout) || (task->count && !task->data))
        return 0;
    if (may_be_negative(task, contiguous) && (is_observed() || ask_truth(ask_neg, tensor)))
        return 0;
    task->layout = contiguous ? NULL : layout;
    return contiguous || keep_told_layout(told, type_width[task->type], layout);
}

/* Describe a tensor in this process's memory; 0 for any other, without an error. Elements that do not lie one after
   another are described in the layout, and refused where there is none. `told` keeps what torch told; without dims (-1)
   where it told nothing. */
static int read_tensor_told(PyObject *tensor, int want, Task *task, Layout *layout, Told *told)
{
    memset(task, 0, sizeof *task);
    told->dims = -1;
    if (!is_plain_type(tensor))
        return 0;
    task->want = want;
    int found = is_told(tensor, told) ? read_told(tensor, told, task, layout)
                                      : (told->dims = -1, ask_tensor(tensor, task, layout));
    PyErr_Clear();
    return found;
}

static int read_tensor(PyObject *tensor, int want, Task *task, Layout *layout)
{
    Told told;
    return read_tensor_told(tensor, want, task, layout, &told);
}

/* How many threads to use: as many as asked (0 or NULL: as torch does) for large work, never in a forked child. */
static int choose_threads(int64_t bytes, PyObject *asked)
{
#if defined(__GNUC__)
    if (bytes < THREAD_BYTES || !gomp_parallel || process_id() != home_process)
        return 1;
    long threads = asked ? PyLong_AsLong(asked) : 0;
    if (!threads) {
        PyObject *answer = PyObject_CallFunctionObjArgs(ask_threads, NULL);
        threads = answer ? PyLong_AsLong(answer) : 1;
        Py_XDECREF(answer);
    }
    PyErr_Clear();
    return threads < 1 ? 1 : threads > 1024 ? 1024 : (int)threads;
#else
    (void)bytes, (void)asked;
    return 1;
#endif
}

static int64_t count_bytes(const Task *task)
{
    return task->count * type_width[task->type];
}

static void run_unlocked(const Task *tasks, int64_t n, Piece *totals, int64_t bytes, int threads)
{
    if (bytes < FREE_BYTES) {
        run_tasks(tasks, n, totals, threads);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    run_tasks(tasks, n, totals, threads);
    Py_END_ALLOW_THREADS
}

static int has_count(Py_ssize_t n, Py_ssize_t expected)
{
    if (n != expected)
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return n == expected;
}

/* For what asks tensors. */
static int check_count(Py_ssize_t n, Py_ssize_t expected)
{
    if (plain_types)
        return has_count(n, expected);
    PyErr_SetString(PyExc_TypeError, "configure() comes first");
    return 0;
}

/* Statistics are read in the order of memory; hash and histogram in the order of the elements, in a second pass where
   the two differ. */
static void measure_layout(Task *task, Layout *logical, Piece *piece, int threads)
{
    Piece second;
    int width = type_width[task->type], want = task->want;
    int64_t all = task->count, bytes = count_bytes(task);
    collapse(logical);
    Layout memory = *logical;
    int64_t repeats = follow_memory(&memory);
    task->layout = is_dense(&memory, width) ? NULL : &memory;
    task->count = count_elements(&memory);
    task->want = WANT_STATS;
    run_unlocked(task, 1, piece, bytes, threads);
    repeat_piece(piece, repeats);
    task->count = all;
    if (want != WANT_STATS) {
        task->layout = is_dense(logical, width) ? NULL : logical;
        task->want = want & ~WANT_STATS;
        task->has_nan = piece->nan > 0;
        run_unlocked(task, 1, &second, bytes, threads);
        piece->hash = second.hash;
        if (want & WANT_HIST)
            memcpy(piece->hist, second.hist, sizeof piece->hist);
    }
}

PyDoc_STRVAR(measure_doc, "measure(tensor, row, hash, hist, threads) -> bool\n\n"
                          "Measure a tensor in memory into rows at these addresses; False for one that is not.");

static PyObject *measure(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Target target;
    Layout layout;
    Task task;
    Piece piece;
    (void)module;
    if (!check_count(n, 5) || !parse_target(args + 1, &target))
        return NULL;
    if (!read_tensor(args[0], count_wants(&target), &task, &layout))
        Py_RETURN_FALSE;
    int threads = choose_threads(count_bytes(&task), args[4]);
    if (task.layout)
        measure_layout(&task, &layout, &piece, threads);
    else
        run_unlocked(&task, 1, &piece, count_bytes(&task), threads);
    write_target(&piece, &task, &target, 0);
    Py_RETURN_TRUE;
}

static int pair_tensors(PyObject *tensor, PyObject *old, int want, Task *task)
{
    Task before;
    if (!read_tensor(tensor, want, task, NULL))
        return 0;
    if (!old)
        return 1;
    if (!read_tensor(old, want, &before, NULL) || before.type != task->type || before.count != task->count)
        return 0;
    task->old = (char *)(uintptr_t)before.data;
    task->measured = is_float(task->type) ? F32 : F64;
    return 1;
}

/* Read all tensors into tasks; return the list of positions that could not be read (their tasks are empty). */
static PyObject *read_tensors(PyObject *tensors, PyObject *olds, Py_ssize_t n, int want, Task *tasks)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < n; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i), *old = olds ? PyTuple_GetItem(olds, i) : NULL;
        if (pair_tensors(tensor, old, want, &tasks[i]))
            continue;
        PyObject *position = PyLong_FromSsize_t(i);
        memset(&tasks[i], 0, sizeof *tasks);
        if (!position || PyList_Append(left, position) < 0)
            Py_CLEAR(left);
        Py_XDECREF(position);
    }
    return left;
}

/* Measure tasks into consecutive rows; those that want nothing are left out. */
static void measure_tasks(const Task *tasks, Py_ssize_t n, Piece *pieces, const Target *target, PyObject *threads)
{
    int64_t bytes = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        bytes += count_bytes(&tasks[i]);
    run_unlocked(tasks, n, pieces, bytes, choose_threads(bytes, threads));
    for (Py_ssize_t i = 0; i < n; i++)
        if (tasks[i].want)
            write_target(&pieces[i], &tasks[i], target, i);
}

static PyObject *measure_list(PyObject *tensors, PyObject *olds, PyObject *const *args)
{
    Target target;
    Py_ssize_t n = PyTuple_Size(tensors);
    if (n < 0 || (olds && PyTuple_Size(olds) != n) || !parse_target(args, &target)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "as many old tensors as new ones");
        return NULL;
    }
    Task *tasks = calloc((size_t)n + 1, sizeof *tasks);
    Piece *pieces = malloc(((size_t)n + 1) * sizeof *pieces);
    PyObject *left = tasks && pieces ? read_tensors(tensors, olds, n, count_wants(&target), tasks) : PyErr_NoMemory();
    if (left)
        measure_tasks(tasks, n, pieces, &target, args[3]);
    free(tasks);
    free(pieces);
    return left;
}

/* Hold on to the tensors: while the interpreter is released, someone might change the lists. */
static PyObject *measure_kept(PyObject *tensors, PyObject *olds, PyObject *const *args)
{
    PyObject *kept = PySequence_Tuple(tensors), *kept_olds = kept && olds ? PySequence_Tuple(olds) : NULL;
    PyObject *left = kept && (kept_olds || !olds) ? measure_list(kept, kept_olds, args) : NULL;
    Py_XDECREF(kept);
    Py_XDECREF(kept_olds);
    return left;
}

PyDoc_STRVAR(measure_many_doc, "measure_many(tensors, row, hash, hist, threads) -> list\n\n"
                               "Measure tensors into consecutive rows; return the positions left to the caller.");

static PyObject *measure_many(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    return check_count(n, 5) ? measure_kept(args[0], NULL, args + 1) : NULL;
}

PyDoc_STRVAR(measure_updates_doc, "measure_updates(new, old, row, hash, hist, threads) -> list\n\n"
                                  "Measure new - old and copy new to old; return the positions left to the caller.");

static PyObject *measure_updates(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    return check_count(n, 6) ? measure_kept(args[0], args[1], args + 2) : NULL;
}

PyDoc_STRVAR(measure_memory_doc, "measure_memory(address, type, count, row, hash, hist)\n\n"
                                 "Measure elements of a numbered type that lie one after another, in the calling thread;\n"
                                 "needs no torch, for readers of files.");

static PyObject *measure_memory(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Target target;
    Task task;
    Piece piece;
    (void)module;
    memset(&task, 0, sizeof task);
    if (!has_count(n, 6))
        return NULL;
    task.data = as_address(args[0]);
    task.type = task.measured = (int)PyLong_AsLong(args[1]);
    task.count = PyLong_AsLongLong(args[2]);
    if (!parse_target(args + 3, &target))
        return NULL;
    if (task.type < 0 || task.type >= TYPES || task.count < 0) {
        PyErr_SetString(PyExc_ValueError, "unknown element type or negative count");
        return NULL;
    }
    task.want = count_wants(&target);
    run_unlocked(&task, 1, &piece, count_bytes(&task), 1);
    write_target(&piece, &task, &target, 0);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(merge_doc, "merge(row, hash, hist, other_row, other_hash, other_hist)\n\n"
                        "Merge the second row into the first; hash and hist addresses may be 0.");

static PyObject *merge(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    Target to, from;
    (void)module;
    if (!check_count(n, 6) || !parse_target(args, &to) || !parse_target(args + 3, &from))
        return NULL;
    merge_row(to.row, from.row);
    if (to.hash)
        *to.hash = chain_hash(*to.hash, *from.hash);
    for (int i = 0; to.hist && i < BINS; i++)
        to.hist[i] = from.hist[i] > UINT32_MAX - to.hist[i] ? UINT32_MAX : to.hist[i] + from.hist[i];
    Py_RETURN_NONE;
}

PyDoc_STRVAR(select_doc, "select(name) -> str\n\n"
                         "Use a variant of the loops by name ('' for the best); return the name of the one in use.");

static PyObject *select_variant(PyObject *module, PyObject *name)
{
    const Variant *found = NULL;
    (void)module;
    for (int i = 0; i < VARIANTS; i++)
        if (is_runnable(&variants[i]) && (PyUnicode_GetLength(name) == 0 ||
                                          PyUnicode_CompareWithASCIIString(name, variants[i].name) == 0))
            found = &variants[i];
    if (!found)
        return PyErr_Format(PyExc_ValueError, "no variant %R on this processor", name);
    variant = found;
    return PyUnicode_FromString(variant->name);
}

PyDoc_STRVAR(variants_doc, "variants() -> tuple\n\nNames of the variants this processor can run, slowest first.");

static PyObject *list_variants(PyObject *module, PyObject *unused)
{
    PyObject *names = PyList_New(0), *answer;
    (void)module, (void)unused;
    for (int i = 0; names && i < VARIANTS; i++) {
        PyObject *name = PyUnicode_FromString(variants[i].name);
        if (!name || (is_runnable(&variants[i]) && PyList_Append(names, name) < 0))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    answer = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return answer;
}

static int keep_types(PyObject *types)
{
    plain_types = PyTuple_Size(types);
    if (plain_types < 1 || plain_types > MAX_TYPES)
        return 0;
    for (Py_ssize_t i = 0; i < plain_types; i++)
        Py_INCREF(plain_type[i] = PyTuple_GetItem(types, i));
    return 1;
}

static int keep_dtypes(PyObject *codes)
{
    PyObject *dtype, *code;
    Py_ssize_t at = 0;
    dtypes = 0;
    while (PyDict_Next(codes, &at, &dtype, &code) && dtypes < MAX_DTYPES) {
        Py_INCREF(dtype);
        dtype_object[dtypes] = dtype;
        dtype_code[dtypes++] = (int)PyLong_AsLong(code);
    }
    return !PyErr_Occurred();
}

PyDoc_STRVAR(configure_doc,
             "configure(types, codes, questions, openmp, exchange)\n\n"
             "Tell the kernel once about torch: the plain tensor classes, dtype -> element type, the unbound methods\n"
             "(data_ptr, numel, is_contiguous, stride, is_neg, storage_offset) and functions (is a torch-function mode on, number\n"
             "of threads, are gradients on, has a tensor a storage) to ask, the address of GOMP_parallel or 0, and the exchange\n"
             "table of DLPack or None.");

static PyObject *configure(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    PyObject **slots[] = {&ask_data_ptr, &ask_numel, &ask_contiguous, &ask_stride,
                           &ask_neg,      &ask_offset, &ask_mode,      &ask_threads, &ask_grad,
                           &ask_storage};
    (void)module;
    if (n != 5 || !PyDict_Check(args[1]) || !PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != QUESTIONS ||
        !keep_types(args[0]) || !keep_dtypes(args[1]) || !keep_exchange(args[4])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "configure(types, codes, questions, openmp, exchange)");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < QUESTIONS; i++)
        Py_INCREF(*slots[i] = PyTuple_GetItem(args[2], i));
    home_process = process_id();
#if defined(__GNUC__)
    *(void **)&gomp_parallel = as_address(args[3]);
#endif
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

#include "_glance.h"
#include "_weigh.h"
#include "_lists.h"
#include "_part.h"
#include "_ledger.h"
#include "_state.h"
#include "_latch.h"
#include "_tray.h"
#include "_leaf.h"
#include "_beat.h"
#include "_shelf.h"
#include "_course.h"
#include "_gates.h"
#include "_fetch.h"
#include "_steps.h"
#include "_passes.h"
#include "_pack.h"
#include "_turn.h"
#include "_over.h"
#include "_checksum.h"
#include "_records.h"

static PyMethodDef methods[] = {
    FAST("configure", configure, configure_doc),
    FAST("measure", measure, measure_doc),
    FAST("measure_many", measure_many, measure_many_doc),
    FAST("measure_updates", measure_updates, measure_updates_doc),
    FAST("measure_memory", measure_memory, measure_memory_doc),
    FAST("merge", merge, merge_doc),
    FAST("pack_histograms", pack_histograms, pack_histograms_doc),
    FAST("turn_rows", turn_rows, turn_rows_doc),
    FAST("turn_over", turn_over, turn_over_doc),
    FAST("crc32", crc32, crc32_doc),
    FAST("settle", settle, settle_doc),
    FAST("list_of_type", list_of_type, list_of_type_doc),
    FAST("find_bad", find_bad, find_bad_doc),
    FAST("list_stale", list_stale, list_stale_doc),
    {"copy_buffers", copy_buffers_in, METH_O, copy_buffers_doc},
    FAST("take", take, take_doc),
    FAST("glance", glance, glance_doc),
    FAST("add_up", add_up, add_up_doc),
    FAST("sample_rows", sample_rows, sample_rows_doc),
    FAST("sample_first", sample_first, sample_first_doc),
    FAST("find_place", find_place, find_place_doc),
    FAST("glance_row", glance_row, glance_row_doc),
    FAST("count_zeros", count_zeros, count_zeros_doc),
    {"count_labels", count_labels, METH_O, count_labels_doc},
    {"list_leaves", list_leaves, METH_O, list_leaves_doc},
    {"copy_memory", copy_memory, METH_O, copy_memory_doc},
    FAST("has_same_copies", has_same_copies, has_same_copies_doc),
    {"read_number", read_number, METH_O, read_number_doc},
    {"weigh", weigh, METH_O, weigh_doc},
    {"stamp", stamp, METH_O, stamp_doc},
    FAST("list_frames", list_frames, list_frames_doc),
    FAST("has_same", has_same, has_same_doc),
    FAST("holds", holds, holds_doc),
    {"list_versions", list_versions, METH_O, list_versions_doc},
    {"list_gradients", list_gradients, METH_O, list_gradients_doc},
    {"select", select_variant, METH_O, select_doc},
    {"variants", list_variants, METH_NOARGS, variants_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Statistics of memory, in one pass.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    fill_tables();
    fill_checksum_tables();
    for (int i = 0; i < VARIANTS; i++)
        if (is_runnable(&variants[i]))
            variant = &variants[i];
    str_dtype = PyUnicode_InternFromString("dtype");
    str_is_cpu = PyUnicode_InternFromString("is_cpu");
    str_is_nested = PyUnicode_InternFromString("is_nested");
    str_shape = PyUnicode_InternFromString("shape");
    str_params = PyUnicode_InternFromString("params");
    int is_named = str_dtype && str_is_cpu && str_is_nested && str_shape && str_params && intern_glance_names();
    PyObject *module = is_named ? PyModule_Create(&definition) : NULL;
#ifdef HAVE_CLOCK
    if (module && !add_types(module))
        Py_CLEAR(module);
#endif
    return module;
}
