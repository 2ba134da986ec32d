/* The CRC-32 of zlib and Ethernet, where the processor multiplies polynomials: many times as fast as zlib's, which is its
   twin.

   Four remainders of 128 bits run side by side. To go on by n bits is to multiply by x^n, of which only what is left
   modulo the polynomial matters. Bits are reflected: the lowest bit of a byte is the highest power.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_X86
#define POLYNOMIAL 0xEDB88320u
#define HAS_POLYNOMIALS __attribute__((target("pclmul,sse4.1")))

enum { FOLDED_BYTES = 64 };

static uint32_t one_byte[256];
static uint64_t power_608, power_480, power_160, power_96; /* reflected, so one bit up */

static uint32_t shift_out(uint32_t crc, int bits)
{
    for (int i = 0; i < bits; i++)
        crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
    return crc;
}

static uint64_t power_of_x(int n)
{
    return (uint64_t)shift_out(0x80000000u, n) << 1;
}

static void fill_checksum_tables(void)
{
    for (uint32_t i = 0; i < 256; i++)
        one_byte[i] = shift_out(i, 8);
    power_608 = power_of_x(4 * 128 + 32);
    power_480 = power_of_x(4 * 128 - 32);
    power_160 = power_of_x(128 + 32);
    power_96 = power_of_x(128 - 32);
}

static uint32_t add_bytes(uint32_t crc, const uint8_t *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        crc = crc >> 8 ^ one_byte[(crc ^ data[i]) & 0xFF];
    return crc;
}

static inline HAS_POLYNOMIALS __m128i fold(__m128i sum, __m128i powers, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(sum, powers, 0x00), high = _mm_clmulepi64_si128(sum, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* At least FOLDED_BYTES. */
static HAS_POLYNOMIALS uint32_t fold_bytes(uint32_t crc, const uint8_t *data, size_t n)
{
    __m128i far = _mm_set_epi64x((int64_t)power_480, (int64_t)power_608);
    __m128i near = _mm_set_epi64x((int64_t)power_96, (int64_t)power_160);
    __m128i sum[4];
    uint8_t rest[16];
    for (int i = 0; i < 4; i++)
        sum[i] = _mm_loadu_si128((const __m128i *)(const void *)(data + 16 * i));
    sum[0] = _mm_xor_si128(sum[0], _mm_cvtsi32_si128((int)crc));
    for (data += FOLDED_BYTES, n -= FOLDED_BYTES; n >= FOLDED_BYTES; data += FOLDED_BYTES, n -= FOLDED_BYTES)
        for (int i = 0; i < 4; i++)
            sum[i] = fold(sum[i], far, _mm_loadu_si128((const __m128i *)(const void *)(data + 16 * i)));
    for (int i = 1; i < 4; i++)
        sum[i] = fold(sum[i - 1], near, sum[i]);
    _mm_storeu_si128((__m128i *)(void *)rest, sum[3]);
    return add_bytes(add_bytes(0, rest, sizeof rest), data, n);
}

static int can_fold(void)
{
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
#else
enum { FOLDED_BYTES = 64 };
static void fill_checksum_tables(void) {}
static uint32_t fold_bytes(uint32_t crc, const uint8_t *data, size_t n)
{
    (void)data;
    (void)n;
    return crc;
}
static int can_fold(void)
{
    return 0;
}
#endif

PyDoc_STRVAR(crc32_doc, "crc32(address, bytes, crc) -> int or None\n\n"
                        "Return the CRC-32 of some memory, going on from that of what lies before it; None where zlib is\n"
                        "as quick.");

static PyObject *crc32(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 3))
        return NULL;
    const uint8_t *data = as_address(args[0]);
    uint64_t size = PyLong_AsUnsignedLongLong(args[1]);
    uint32_t crc = ~(uint32_t)PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (size < FOLDED_BYTES || !can_fold())
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    crc = ~fold_bytes(crc, data, size);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(crc);
}
