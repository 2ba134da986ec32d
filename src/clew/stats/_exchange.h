/* What torch tells of a tensor in one call, without a Python frame or object: the exchange table of DLPack, an interface
   in C that torch offers from 2.10 on. Where it is not offered, tensors are asked by the methods they have in Python.

   Includes nothing: it is a part of _kernel.c. */

enum { TABLE_MAJOR = 1, DEVICE_CPU = 1 };
enum { CODE_INT = 0, CODE_UINT = 1, CODE_FLOAT = 2, CODE_BFLOAT = 4, CODE_BOOL = 6 };

typedef struct {
    void *data;
    int32_t device, device_number, dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *stride; /* in elements; both belong to the tensor */
    uint64_t offset;
} Told;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *to_managed, *from_managed;
    int (*tell)(void *tensor, Told *told);
    void *stream;
} ExchangeTable;

static int (*tell_tensor)(void *tensor, Told *told);

/* None: torch offers nothing. */
static int keep_exchange(PyObject *capsule)
{
    tell_tensor = NULL;
    if (capsule == Py_None)
        return 1;
    const ExchangeTable *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table && table->major == TABLE_MAJOR)
        tell_tensor = table->tell;
    return table != NULL;
}

static int find_told_type(const Told *told)
{
    int wide = told->bits == 8 ? 0 : told->bits == 16 ? 1 : told->bits == 32 ? 2 : told->bits == 64 ? 3 : -1;
    if (told->lanes != 1 || wide < 0)
        return -1;
    switch (told->code) {
    case CODE_FLOAT:
        return wide == 3 ? F64 : wide == 2 ? F32 : wide == 1 ? F16 : -1;
    case CODE_BFLOAT:
        return wide == 1 ? BF16 : -1;
    case CODE_INT:
        return I8 + wide;
    case CODE_UINT:
        return U8 + wide;
    case CODE_BOOL:
        return wide == 0 ? U8 : -1;
    default:
        return -1;
    }
}

/* Count the elements; whether they lie one after another in order. */
static int is_told_contiguous(const Told *told, int64_t *count)
{
    int64_t expected = 1, dense = 1;
    for (int i = told->dims - 1; i >= 0; i--) {
        dense &= told->shape[i] == 1 || told->stride[i] == expected;
        expected *= told->shape[i];
    }
    *count = expected;
    return dense || !expected;
}

static int keep_told_layout(const Told *told, int width, Layout *layout)
{
    if (told->dims > MAX_DIMS)
        return 0;
    layout->dims = told->dims;
    for (int i = 0; i < told->dims; i++) {
        layout->size[i] = told->shape[i];
        layout->stride[i] = told->stride[i] * width;
    }
    return 1;
}

/* Whether torch told of a tensor in this process's memory. */
static int is_told(PyObject *tensor, Told *told)
{
    if (!tell_tensor || (was_refused && !may_tell(tensor)))
        return 0;
    if (tell_tensor(tensor, told) != 0) {
        PyErr_Clear();
        was_refused = 1;
        return 0;
    }
    told->data = (char *)told->data + told->offset;
    return told->device == DEVICE_CPU && find_told_type(told) >= 0;
}
