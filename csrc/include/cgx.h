/* The native library of torch_cgx: quantizing kernels, and an executor that runs collective programs over shared
 * memory or over connections.
 *
 * A plain C ABI over raw pointers. It knows nothing of torch or Python, and of MPI what it is told; every count is
 * 64-bit; no function throws. Functions that can fail return a cgx_status; a group keeps the text of its first failure
 * (cgx_group_error).
 */
#ifndef CGX_H
#define CGX_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CGX_API __attribute__((visibility("default")))
#define CGX_ABI_VERSION 12

/* Bytes are what is only moved: raw pieces alone, whose "values" are copied and never computed with. */
typedef enum cgx_dtype { CGX_FLOAT32 = 0, CGX_FLOAT16 = 1, CGX_BFLOAT16 = 2, CGX_FLOAT64 = 3, CGX_BYTES = 4 } cgx_dtype;

typedef enum cgx_simd { CGX_SCALAR = 0, CGX_AVX2 = 1, CGX_AVX512 = 2, CGX_NEON = 3 } cgx_simd;

/* With what a kernel runs. The bytes it writes depend on neither. */
typedef struct cgx_means {
  int32_t simd;    /* cgx_simd */
  int32_t threads; /* at most so many, the caller's included; small calls take fewer */
} cgx_means;

typedef enum cgx_status {
  CGX_OK = 0,
  CGX_PENDING = 1,
  CGX_ERROR_TIMEOUT = -1,
  CGX_ERROR_PEER_LOST = -2,
  CGX_ERROR_MISMATCH = -3,
  CGX_ERROR_POISONED = -4,
  CGX_ERROR_SHARED_MEMORY = -5,
  CGX_ERROR_ARGUMENT = -6,
  CGX_ERROR_CLOSED = -7,
  CGX_ERROR_CONNECTION = -8,
} cgx_status;

/* How a piece is coded (docs/wire_format.md). */
typedef enum cgx_codec_kind { CGX_RAW = 0, CGX_MAXMIN = 1, CGX_ROTATED = 2 } cgx_codec_kind;

/* Consecutive values of a tensor that share a codec, and where their payload lies in its slot. */
typedef struct cgx_piece {
  int64_t offset;   /* first value, counted from the tensor's start; also the value's index for random rounding */
  int64_t numel;    /* values, raw tail included */
  int64_t payload;  /* bytes from the slot's start */
  int64_t raw_tail; /* how many of the last values are sent unquantized; raw pieces: all are, whatever stands here */
  int64_t block;    /* values of a block; rotated: a power of two, 64 to 4096 */
  int64_t bits;     /* per value; max-min: 1 to 8; rotated: 1 to 4 */
  int64_t kind;     /* cgx_codec_kind */
} cgx_piece;

/* Where random rounding draws from; stochastic 0 rounds to nearest. */
typedef struct cgx_rounding {
  uint64_t seed;
  uint64_t op;
  uint32_t rank;
  uint32_t stage;
  int64_t stochastic;
} cgx_rounding;

CGX_API int cgx_abi_version(void);
CGX_API int cgx_best_simd(void);
CGX_API int cgx_simd_available(int simd);

CGX_API int64_t cgx_piece_payload_nbytes(const cgx_piece* piece, int dtype);

/* residual, if not NULL, is indexed like values and receives what encoding lost of each: value - decoded, in float32;
 * 0 where a value travels raw, unchanged in blocks that hold a NaN or an infinity. */
CGX_API int cgx_encode(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, const void* values,
                       uint8_t* payload, const cgx_rounding* rounding, float* residual);

/* add: values += decoded instead of values = decoded. */
CGX_API int cgx_decode(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces,
                       const uint8_t* payload, void* values, int add);

/* values = decode(encode((values + payloads[0] + payloads[1] + ...) * scale)); the encoded sum goes to out.
 * residual as above, of the sum, divided by scale: what the sum, not the mean, has lost. */
CGX_API int cgx_reduce(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, void* values,
                       const uint8_t* const* payloads, int64_t n_payloads, double scale, uint8_t* out,
                       const cgx_rounding* rounding, float* residual);

/* values = (values + payloads[0] + payloads[1] + ...) * scale, added up in float32 (double: in double), rounded once.
 */
CGX_API int cgx_sum(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, void* values,
                    const uint8_t* const* payloads, int64_t n_payloads, double scale);

/* ---- plans: what one rank does in one operation, as tables ---- */

typedef enum cgx_step_kind {
  CGX_STEP_ENCODE = 0,
  CGX_STEP_SEND = 1,
  CGX_STEP_RECEIVE = 2,
  CGX_STEP_REDUCE = 3,
  CGX_STEP_DECODE = 4,
  CGX_STEP_SUM = 5,
  CGX_STEP_ADD = 6
} cgx_step_kind;

typedef struct cgx_step {
  int64_t kind;
  int64_t slot;        /* written (encode, reduce), moved (send, receive) or read (decode, add); sum: its first input */
  int64_t peer;        /* send and receive */
  int64_t first_piece; /* encode, reduce, decode, add; sum: of the share */
  int64_t n_pieces;
  int64_t first_input; /* reduce, sum: a range of the plan's list of input slots */
  int64_t n_inputs;
  int64_t partial; /* reduce: 1: not all contributions are in, so the sum is not scaled yet */
} cgx_step;

/* A place for a payload. A rank's table has those that it touches. What passes between two ranks is in the same order
 * in the tables of both, since messages are known by their number; ranks of one node have the same places. The writer
 * is the rank that puts a payload into its node's memory: by encoding, or by receiving it from elsewhere. A flag is the
 * writer's own; where some ranks are linked, it is the slot's own among those of its slice.
 *
 * An unquantized payload needs no place where no ranks share memory: it is sent from the tensor that it would be
 * encoded from, and received into the tensor that it would be decoded into. */
typedef enum cgx_home {
  CGX_HOME_MEMORY = 0,
  CGX_HOME_VALUES = 1, /* the submission's values */
  CGX_HOME_RESULT = 2  /* where decoded values go: its share or, without one, its values */
} cgx_home;

typedef struct cgx_slot {
  int64_t offset; /* bytes from the start of the part of the memory that its slice uses, or of the tensor */
  int64_t nbytes;
  int64_t writer;
  int64_t flag;
  int64_t slice;
  int64_t home; /* cgx_home */
} cgx_slot;

typedef struct cgx_plan cgx_plan;

/* Steps run in the order of their table; a step belongs to the slice of its slot. Slice t uses part t mod ring of the
 * memory, and part_nbytes is what the largest slice needs there, n_flags one more than its largest flag, of all ranks
 * of the node. Without links ring is 2 and steps are in the order of their slices; with links slices overlap, and ring
 * must be as many as are under way at once, or more. A slot at home in a tensor has one raw piece, and is no
 * input of a sum; only groups that are linked by sockets alone run such plans. NULL where a table refers outside of
 * another, or a payload outside of its slot (status: CGX_ERROR_ARGUMENT), or where there is no memory for it
 * (CGX_ERROR_SHARED_MEMORY). */
CGX_API cgx_plan* cgx_plan_new(int64_t world, int dtype, const cgx_piece* pieces, int64_t n_pieces,
                               const cgx_slot* slots, int64_t n_slots, const int64_t* inputs, int64_t n_inputs,
                               const cgx_step* steps, int64_t n_steps, int64_t n_slices, int64_t ring,
                               int64_t part_nbytes, int64_t n_flags, int* status);
CGX_API void cgx_plan_free(cgx_plan* plan);

/* ---- groups: ranks of one node share memory, ranks of different nodes are linked by connections ---- */

/* What a rank says that it calls; two ranks whose calls differ in any field but sequence have lost step. */
typedef struct cgx_call {
  int32_t operation; /* index into the names given to cgx_group_open */
  int32_t dtype;     /* likewise */
  int32_t reduction; /* likewise; -1: none */
  int32_t root;      /* group rank; -1: none */
  int32_t bits;
  int32_t block;
  int32_t ndim; /* -1: shapes may differ between ranks and are not compared */
  int32_t kind; /* of the codec, where bits says that values are compressed */
  int64_t numel;
  int64_t layout; /* hash of what else must be alike */
  int64_t dims[6];
} cgx_call;

typedef struct cgx_stats {
  int64_t operations;
  int64_t compressed_operations;
  int64_t bytes_before;
  int64_t bytes_after;
  int64_t bytes_sent;
  int64_t encode_ns;
  int64_t wait_ns;
  int64_t reduce_ns;
  int64_t decode_ns;
} cgx_stats;

typedef struct cgx_submission {
  const cgx_plan* plan; /* over links NULL: done when all ranks have made this call */
  void* values;
  float* residual; /* as in cgx_encode and cgx_reduce, or NULL */
  void* share;     /* what sums are made in, and what is decoded goes to; NULL: values are decoded over `values` */
  double scale;
  cgx_rounding rounding; /* operation, rank and stage are filled in by the group */
  int64_t timeout_ms;
  int64_t bytes_before;
  int64_t bytes_after;
  int64_t compressed;
  int64_t wake;      /* 1: let the group's thread start at once; 0: the caller waits right away and runs it itself */
  int64_t completed; /* out: number of the last operation that is done */
  int64_t sequence;  /* out: of its call on the board */
} cgx_submission;

/* One operation as the flight recorder tells it. Times are nanoseconds of the monotonic clock; 0: not yet, or unknown.
 */
typedef struct cgx_record {
  int64_t number;   /* as cgx_group_submit returned it */
  int64_t sequence; /* of its call on the board: the same on all ranks */
  int64_t state;    /* cgx_record_state */
  int64_t submitted_ns;
  int64_t started_ns;
  int64_t finished_ns;
  int64_t encode_ns;
  int64_t wait_ns; /* all waits: for payloads, for the segment, for peers to leave the half */
  int64_t reduce_ns;
  int64_t decode_ns;
  int64_t bytes_before;
  int64_t bytes_after;
  int64_t bytes_sent;
  int64_t waited_for; /* the peer that was waited for longest; -1: none */
  int64_t waited_for_ns;
  int64_t waiting_for; /* the peer that it waits for now, or waited for when it failed; -1: none */
  int64_t waiting_since_ns;
} cgx_record;

typedef enum cgx_record_state {
  CGX_RECORD_QUEUED = 0,
  CGX_RECORD_RUNNING = 1,
  CGX_RECORD_DONE = 2,
  CGX_RECORD_FAILED = 3
} cgx_record_state;

/* What the control segment tells of a rank. */
typedef struct cgx_peer {
  int64_t pid;
  int64_t life;        /* 0: not there yet; 1: present; 2: has left the group; 3: its process, or its link, is gone */
  int64_t noted;       /* sequence of its latest call on the board; 0: none */
  int64_t noted_at_ns; /* by the monotonic clock */
  int64_t waits_on;    /* the rank that it sleeps for; -1: none at this moment */
} cgx_peer;

typedef struct cgx_group cgx_group;

/* Creates the control segment of a group and returns its file name (to be told to the peers), or a negative status. */
CGX_API int cgx_control_create(int64_t world, char* name, int64_t name_nbytes, char* error, int64_t error_nbytes);
/* Maps it. nodes: by rank, the number of its node; global_ranks: what errors call the ranks. names: strings for errors,
 * each list separated by '\n'. name NULL: this rank shares memory with none. Ranks that share none are linked by
 * cgx_group_link (their data perhaps by cgx_group_link_mpi), and those of one node, where there are others, by
 * cgx_group_bell, before the group is used. */
CGX_API cgx_group* cgx_group_open(const char* name, int64_t rank, int64_t world, const int32_t* nodes,
                                  const int32_t* global_ranks, const char* operation_names, const char* dtype_names,
                                  const char* reduction_names, const cgx_means* means, int64_t segment_limit_nbytes,
                                  char* error, int64_t error_nbytes);
/* Hands over a connected, non-blocking socket to a peer, which is closed with the group, and in forked children at
 * once. stream: 0, 1, ... for data; -1 for the control connection, which is given last. */
CGX_API int cgx_group_link(cgx_group* group, int64_t peer, int64_t stream, int fd);
/* An MPI library: addresses of its functions, handles of its own width, and a communicator in which ranks have the
 * group's numbers. It must allow calls from several threads, and its errors must be returned. */
typedef struct cgx_mpi {
  void* isend; /* of MPI_Isend, and so on */
  void* issend;
  void* irecv;
  void* test;
  void* cancel;
  void* finalized;
  uint64_t communicator;
  uint64_t byte;    /* MPI_BYTE */
  int64_t stranded; /* out: 1 once a group was closed while messages were under way; then MPI_Finalize might wait */
} cgx_mpi;

/* Adds a stream to a peer, in place of a data connection: messages with this tag and the next one, which nobody else
 * may use between these two ranks. The library is used until the group is closed. */
CGX_API int cgx_group_link_mpi(cgx_group* group, int64_t peer, cgx_mpi* mpi, int tag);
/* Ends the thread that lets MPI work while nobody else calls it: before MPI_Finalize, and once all groups are closed.
 */
CGX_API void cgx_mpi_stop(void);
/* Hands over, likewise, the end of a pipe by which this rank wakes a peer of its node; of its own rank: the end that it
 * sleeps on. */
CGX_API int cgx_group_bell(cgx_group* group, int64_t peer, int fd);
/* Called by the creator once all have opened it: from then on nothing of the group has a name. */
CGX_API void cgx_control_unlink(const char* name);

CGX_API int64_t cgx_group_note(cgx_group* group, const cgx_call* call);
/* Notes a call and queues what it does, in one order for all threads; the operation's number, or a negative status. */
CGX_API int64_t cgx_group_submit(cgx_group* group, const cgx_call* call, cgx_submission* submission);
/* Waits for an operation, at most slice_ms; CGX_PENDING: not yet, call again. Runs it itself where nobody does. */
CGX_API int cgx_group_wait(cgx_group* group, int64_t operation, int64_t slice_ms);
/* Lets the group's thread take over what a caller left in the middle. */
CGX_API void cgx_group_kick(cgx_group* group);
/* Looks for trouble around an operation that another engine carries: poison and lost step; look_at_peers 1: also peers
 * that died before they made this call; 2: any peer that died. */
CGX_API int cgx_group_check(cgx_group* group, int64_t sequence, int look_at_peers);
/* Which peers have not made the call with this number yet, and where they stand: for messages. */
CGX_API void cgx_group_laggards(cgx_group* group, int64_t sequence, char* text, int64_t text_nbytes);
CGX_API void cgx_group_fail(cgx_group* group, int status, const char* text);
CGX_API int cgx_group_error(cgx_group* group, char* text, int64_t text_nbytes);
/* What is known of one of the last 1,024 operations, or of one that is queued; 0: nothing (any more). */
CGX_API int cgx_group_record(const cgx_group* group, int64_t operation, cgx_record* record);
/* Where a rank stands; text gets its latest call in words. */
CGX_API void cgx_group_peer(cgx_group* group, int64_t rank, cgx_peer* peer, char* text, int64_t text_nbytes);
/* From now on this signal adds 1 to an eventfd, whichever thread gets it and whatever that does; in forked children it
 * does nothing. CGX_PENDING: it has a handler of somebody else's, or is ignored, and was left alone. */
CGX_API int cgx_signal_to_eventfd(int signal_number, int fd);
CGX_API void cgx_group_stats(const cgx_group* group, cgx_stats* stats);
CGX_API void cgx_group_reset_stats(cgx_group* group);
/* Says good-bye to the peers, stops the thread, fails what is pending. Free once, when nobody waits any more. */
CGX_API void cgx_group_close(cgx_group* group);
CGX_API void cgx_group_free(cgx_group* group);

#ifdef __cplusplus
}
#endif
#endif
