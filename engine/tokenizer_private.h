/* Inside the tokenizer. Text goes through these stages, in this order:
 *
 *   valid stretches    bytes that are not UTF-8 become one byte token each, whatever the rest does
 *   added tokens       <|endoftext|> and the like are cut out (raw ones, then normalized ones)
 *   NFC                if the tokenizer asks for it
 *   pre-tokens         words, by regular expression (pretokenizer.h)
 *   merges             bytes of a word -> byte tokens -> merged pairs, lowest rank first
 *
 * Everything below is written by tokenizer_load and read-only after it.
 */
#ifndef FATHOM_TOKENIZER_PRIVATE_H
#define FATHOM_TOKENIZER_PRIVATE_H

#include "engine/engine.h"
#include "engine/pretokenizer.h"

#include <jansson.h>

#define TOKENIZER_IDS_MAX    ((size_t)4 << 20)
#define TOKENIZER_MERGES_MAX ((size_t)4 << 20)
#define TOKENIZER_TEXT_MAX   ((size_t)1 << 30) /* positions in a text fit 32 bits */

struct tokenizer;

/* ---- Vocabulary (tokenizer_vocabulary.c) ----------------------------------------------------- */

enum token_flag {
    TOKEN_SPECIAL = 1,
    TOKEN_ADDED = 2,
    TOKEN_WHOLE = 4, /* a pre-token with exactly these bytes is this one token */
};

/* Bytes of every id, and ids by bytes. The index holds only tokens that merges can name: an added
 * token may have the bytes of an ordinary one (" the" beside "Ġthe"), never its place. */
struct vocabulary {
    size_t size;       /* ids are below; an id with no bytes is a hole */
    char *pool;        /* bytes of all tokens, by id */
    uint32_t *offsets; /* [size + 1] into pool */
    uint8_t *flags;    /* [size], enum token_flag */
    int32_t *slots;    /* [mask + 1], open addressing, -1 empty, at most half full */
    size_t mask;
    uint64_t seed; /* drawn at load: colliding names cannot be prepared in a file */
};

const char *vocabulary_bytes(const struct vocabulary *vocabulary, int32_t id, size_t *length);
int vocabulary_create_index(struct vocabulary *vocabulary, struct error *error);
void vocabulary_index(struct vocabulary *vocabulary, int32_t id);
/* An indexed id, or -1. */
int32_t vocabulary_find(const struct vocabulary *vocabulary, const char *bytes, size_t length);
void vocabulary_clear(struct vocabulary *vocabulary);

/* ---- Merges (tokenizer_merge.c) -------------------------------------------------------------- */

#define MERGE_NONE UINT32_MAX

struct merge_slot {
    int32_t left, right; /* left -1: empty */
    uint32_t rank;
};

struct merge_table {
    struct merge_slot *slots; /* [mask + 1], open addressing by pair, at most half full */
    size_t mask;
    uint64_t seed;
    int32_t *results; /* [count] by rank */
    size_t count;
};

int merge_table_create(struct merge_table *table, size_t count, uint64_t seed, struct error *error);
/* Ranks come in ascending order; a pair given twice keeps the later one, as in Hugging Face's. */
void merge_table_add(struct merge_table *table, int32_t left, int32_t right, uint32_t rank,
                     int32_t result);
void merge_table_clear(struct merge_table *table);

/* Merges the tokens of one pre-token, those of `list` from `first` on, in place: repeatedly the
 * pair of lowest rank, leftmost first. O(n log n). FATHOM_CANCELLED soon after *stop is true. */
int merge_tokens(const struct merge_table *table, struct token_list *list, size_t first,
                 const atomic_bool *stop, struct error *error);

/* Appends the tokens of one pre-token. */
int merge_encode(const struct tokenizer *tokenizer, const char *bytes, size_t length,
                 const atomic_bool *stop, struct token_list *out, struct error *error);

int token_list_reserve(struct token_list *list, size_t extra, struct error *error);

/* ---- Added tokens (tokenizer_added.c) -------------------------------------------------------- */

struct added_token {
    int32_t id;
    bool special;
    bool takes_left, takes_right; /* lstrip, rstrip: white space beside it belongs to it */
};

struct added_node {
    uint32_t child, sibling; /* 0: none */
    int32_t token;           /* index into tokens, or -1 */
    unsigned char byte;
};

/* A trie over bytes; node 0 is the root, whose children are found by `first`. */
struct added_matcher {
    struct added_token *tokens;
    size_t token_count, token_capacity;
    struct added_node *nodes;
    size_t node_count, node_capacity;
    uint32_t first[256];
};

/* Bytes of one added token: bounds the walk from each position of a text. */
#define ADDED_TEXT_MAX 256

/* `text` is what is looked for, not empty. FATHOM_INVALID if it is there already. */
int added_matcher_add(struct added_matcher *matcher, const char *text, size_t length,
                      const struct added_token *token, struct error *error);
void added_matcher_clear(struct added_matcher *matcher);

struct added_match {
    size_t start, end;
    int32_t id;
};

/* Some token takes white space beside it, however much that is. */
bool added_matcher_takes_space(const struct added_matcher *matcher);

/* The leftmost, there the longest, token at or after `from`; special ones only if `special`. */
bool added_matcher_find(const struct added_matcher *matcher, const char *text, size_t length,
                        size_t from, bool special, struct added_match *match);

/* ---- Text (tokenizer_text.c) ----------------------------------------------------------------- */

struct byte_buffer {
    char *bytes;
    size_t length, capacity;
};

/* Bytes at the start of `text` that are valid UTF-8, whole characters. */
size_t utf8_valid_prefix(const char *text, size_t length);

/* Bytes of the white space character (Unicode White_Space) that valid `text` starts or ends with,
 * or 0. */
size_t utf8_leading_space(const char *text, size_t length);
size_t utf8_trailing_space(const char *text, size_t length);

/* True if a look at the lead bytes is enough to know that valid `text` is in NFC. */
bool text_is_surely_nfc(const char *text, size_t length);

/* Replaces `out` with the NFC form of valid `text`; linear in the length. */
int text_normalize_nfc(const char *text, size_t length, struct byte_buffer *out,
                       struct error *error);
int byte_buffer_reserve(struct byte_buffer *buffer, size_t extra, struct error *error);

/* ---- SentencePiece-style pieces (tokenizer_pieces.c) ----------------------------------------- */

enum prefix_space { PREFIX_NEVER, PREFIX_FIRST, PREFIX_ALWAYS };

struct piece_rules {
    bool prepends;           /* the normalizer puts a space before every text between raw tokens */
    enum prefix_space space; /* the pre-tokenizer does, unless there is one: of the first, or all */
    bool splits_words;       /* merges do not cross the beginning of a space */
    bool strips;             /* decoding a whole text drops one space at its start */
    /* Seen while loading: spaces are marked, already by the normalizer; the decoder's parts. */
    bool marks_spaces, marks_early, decodes_spaces, decodes_bytes;
};

/* Reads normalizer, pre_tokenizer and decoder of a tokenizer.json whose model has byte_fallback. */
int piece_rules_read(struct piece_rules *rules, const json_t *json, struct error *error);

/* What a name stands for, written to `out` (which has room for `length`); returns its length. */
size_t piece_bytes(const char *name, size_t length, char *out);
/* "<0x0A>" and the like. */
bool piece_is_byte(const char *name, size_t length, unsigned char *byte);

/* Replaces `out` with the text as pieces are looked for in it, behind a space if `prefix`. */
int piece_text(const char *text, size_t length, bool prefix, struct byte_buffer *out,
               struct error *error);
bool piece_needs_text(const char *text, size_t length);

/* Bytes of the first word: up to the next space that does not begin it. */
size_t piece_word(const char *text, size_t length);

/* Appends what merges start from: a token per character, or those of its bytes. */
int piece_start(const struct tokenizer *tokenizer, const char *text, size_t length,
                struct token_list *out, struct error *error);

/* ---- The whole ------------------------------------------------------------------------------- */

struct tokenizer {
    struct vocabulary vocabulary;
    struct merge_table merges;
    int32_t byte_tokens[256]; /* -1: none, the byte is dropped */
    struct added_matcher raw_added, normalized_added; /* looked for before and after NFC */
    bool normalizes;                                  /* NFC */
    bool has_pieces;                   /* SentencePiece-style: no NFC, no pretokenizer */
    struct piece_rules pieces;
    struct pretokenizer *pretokenizer; /* NULL with pieces */
    size_t longest; /* bytes of a text that one token can stand for; SIZE_MAX: any number */
    bool adds_bos;
    int32_t bos, eos; /* -1: none */
    char *chat_template, *chat_format; /* malloc'd; NULL: none */
};

/* ---- Loading (tokenizer_load.c) -------------------------------------------------------------- */

/* Builds a tokenizer from the object in a tokenizer.json. With `scores` (of every id, in place of
 * model.merges) the pair is merged whose result scores highest; ids of scores are below `count`. */
int tokenizer_create(const json_t *json, const float *scores, size_t count,
                     struct tokenizer **tokenizer, struct error *error);

/* ---- Beside tokenizer.json (tokenizer_config.c) ---------------------------------------------- */

/* tokenizer_config.json and chat_template.jinja; neither need be there. */
int tokenizer_load_config(struct tokenizer *tokenizer, const char *folder, struct error *error);

/* The JSON object in folder/name; the caller json_decref's it. */
int tokenizer_load_json(const char *folder, const char *name, json_t **json, struct error *error);

/* ---- JSON (tokenizer_json.c) ----------------------------------------------------------------- */

/* Reads an optional boolean member; another type is FATHOM_INVALID. */
int json_read_flag(const json_t *object, const char *key, bool absent, bool *value,
                   struct error *error);

/* The string member "type", or "" if there is none; of anything, NULL too. */
const char *json_type_name(const json_t *object);

/* Reads one step of a part of a tokenizer.json into `context`. */
typedef int json_step_reader(void *context, const json_t *step, struct error *error);

/* Has every step of a part read in order: those in `key` of a Sequence, else the part itself. */
int json_read_steps(const json_t *part, const char *key, json_step_reader *read, void *context,
                    struct error *error);

#endif
