// The steps of a round on the device, batch 1: place the tree, accept, compact the target's cache,
// feed the draft. Launched by kernels.py; tests/runtime/gpu/numpy_kernels.py has the same functions in numpy.
//
// Letters as in docs/method.md: W rows of the target's call, M nodes of the draft's tree, S cache
// slots, Hkv heads of a cache. Every argument is a pointer to device memory or a 64-bit integer, so
// a launch needs no table of types. Rows of caches and features are moved as 4-byte words, whatever
// their dtype. No kernel needs a barrier: what one thread reads, no other thread of the same launch
// writes.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// The tree nodes that this call runs: those that fit, up to the first invalid token. Every prefix of
// a tree is a tree, since parents precede their children.
__device__ static i64 usable(const i64* tokens, i64 num_nodes, i64 limit, i64 width, i64 vocab_size)
{
    i64 used = num_nodes < limit ? num_nodes : limit;
    used = used < width ? used : width;
    for (i64 node = 1; node < used; ++node)
        if (tokens[node] < 0 || tokens[node] >= vocab_size) return node;
    return used < 1 ? 1 : used;
}

// The target's inputs for the first W nodes of a tree, one thread per row. Rows beyond the tree are
// padding: token 0 at the root's position, which sees only itself and is seen by no other row.
extern "C" __global__ void place_tree(
    const i64* tokens, const i64* parents, const i64* num_nodes, const i64* node_limit,
    const i64* root, const i64* past_len, i64 vocab_size, i64 width,
    i64* input_ids, i64* position_ids, u8* tree_mask, i64* num_used)
{
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= width) return;
    const i64 used = usable(tokens, *num_nodes, *node_limit, width, vocab_size);
    u8* mask = tree_mask + row * width;
    for (i64 column = 0; column < width; ++column) mask[column] = column == row;
    i64 depth = 0;
    if (row < used) {
        for (i64 node = row; node > 0; ++depth) {
            const i64 parent = parents[node];
            node = parent >= 0 && parent < node ? parent : 0;  // otherwise a broken tree would hang here
            mask[node] = 1;
        }
    }
    input_ids[row] = row == 0 ? *root : row < used ? tokens[row] : 0;
    position_ids[row] = *past_len + depth;
    if (row == 0) *num_used = used;
}

// Greedy acceptance by one thread: a tree is a few hundred integers, all in the L1 cache. chosen:
// number of rows to keep (root included), the target's own token, then those rows. result: read by
// the host. With greedy = 0 the host chooses, and nothing is kept here. A row with NaN logits spoils
// the others (0 times NaN is NaN), so nothing of its call is kept.
extern "C" __global__ void accept_greedy(
    const i64* input_ids, const i64* parents, const i64* position_ids, const i64* next_token,
    const i64* num_used, const i64* greedy, i64* chosen, i64* result)
{
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const i64 used = *num_used;
    i64 spoiled = 0, depth = 0;
    for (i64 node = 0; node < used; ++node) {
        spoiled |= next_token[node] < 0;
        const i64 own = position_ids[node] - position_ids[0];
        depth = own > depth ? own : depth;
    }
    i64* path = chosen + 2;
    i64 kept = 0, token = -1;
    if (*greedy && !spoiled) {
        i64 node = 0;
        while (node >= 0) {
            path[kept] = node;
            result[5 + kept] = input_ids[node];
            ++kept;
            token = next_token[node];
            i64 child = node + 1;
            while (child < used && (parents[child] != node || input_ids[child] != token)) ++child;
            node = child < used ? child : -1;
        }
    }
    chosen[0] = kept;
    chosen[1] = token;
    result[0] = spoiled;
    result[1] = kept;
    result[2] = token;
    result[3] = depth;
    result[4] = used;
}

// Moves the kept rows of every cache to slots past, past + 1, ...: one block per cache and head. Rows
// are ascending and never move to the right, so a thread that processes its column in order reads
// every row before it is overwritten. caches: addresses of [Hkv, S, words] blocks.
extern "C" __global__ void keep_kv(
    const u64* caches, i64 num_heads, i64 capacity, i64 words,
    const i64* past_len, const i64* chosen)
{
    u32* first = (u32*)caches[blockIdx.x / num_heads];
    first += ((i64)(blockIdx.x % num_heads) * capacity + *past_len) * words;
    const i64 kept = chosen[0];
    const i64* path = chosen + 2;
    for (i64 word = threadIdx.x; word < words; word += blockDim.x)
        for (i64 row = 1; row < kept; ++row)
            if (path[row] != row) first[row * words + word] = first[path[row] * words + word];
}

// Sets `count` slots from `past` on to zero: NaN must not remain in masked slots.
extern "C" __global__ void clear_kv(
    const u64* caches, i64 num_heads, i64 capacity, i64 words, const i64* past_len, i64 count)
{
    u32* first = (u32*)caches[blockIdx.x / num_heads];
    first += ((i64)(blockIdx.x % num_heads) * capacity + *past_len) * words;
    const i64 room = capacity - *past_len;
    const i64 size = (count < room ? count : room) * words;
    for (i64 word = threadIdx.x; word < size; word += blockDim.x) first[word] = 0;
}

// Appends kept rows first .. kept - 1 to the rows that wait for the draft: one CUDA block per row. A
// row pairs a position's features with the token of the next position. Of the target's features,
// `words` per row, the head reads the layers listed in `layers`, layer_words each. Rows without room
// are dropped: they accumulate only in a request without a draft.
extern "C" __global__ void feed_draft(
    const u32* features, i64 words, const i64* layers, i64 num_layers, i64 layer_words,
    const i64* input_ids, const i64* chosen, i64 first,
    const i64* draft_rows, i64 capacity, u32* draft_features, i64* draft_next_ids)
{
    const i64 kept = chosen[0], row = (i64)blockIdx.x + first;
    const i64 to = *draft_rows + (i64)blockIdx.x;
    if (row >= kept || to >= capacity) return;
    const i64* path = chosen + 2;
    const u32* source = features + path[row] * words;
    u32* target = draft_features + to * num_layers * layer_words;
    for (i64 word = threadIdx.x; word < num_layers * layer_words; word += blockDim.x)
        target[word] = source[layers[word / layer_words] * layer_words + word % layer_words];
    if (threadIdx.x == 0)
        draft_next_ids[to] = row + 1 < kept ? input_ids[path[row + 1]] : chosen[1];
}

// Commits the kept rows: the target's length grows, and its own token is the next root.
extern "C" __global__ void advance(const i64* chosen, i64* past_len, i64* root)
{
    if (blockIdx.x != 0 || threadIdx.x != 0 || chosen[0] == 0) return;
    *past_len += chosen[0];
    *root = chosen[1];
}

// Counts the rows that feed_draft appended with the same arguments.
extern "C" __global__ void count_fed(const i64* chosen, i64 first, i64 capacity, i64* draft_rows)
{
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const i64 left = chosen[0] - first, room = capacity - *draft_rows;
    const i64 fed = left < room ? left : room;
    if (fed > 0) *draft_rows += fed;
}

// Records that the draft has run its waiting rows: they are in its cache now.
extern "C" __global__ void draft_done(i64* draft_past_len, i64* draft_rows)
{
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    *draft_past_len += *draft_rows;
    *draft_rows = 0;
}
