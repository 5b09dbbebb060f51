/* A load generator for OpenAI-compatible servers: what `fathom bench` does.
 *
 * Definitions are those of vLLM's serving benchmark, seen from the client. A chunk is an event that
 * has choices; their text may be empty (a special token, half a character, a chat's role).
 *   TTFT  from sending the request (connecting and TLS included) to the first chunk
 *   ITL   between one chunk and the next; chunks that come in one read are 0 apart
 *   E2E   from sending to the last chunk, or the end of an answer that is not streamed
 *   TPOT  (E2E - TTFT) / (output tokens - 1), of answers with two tokens or more
 * Output tokens are those that the server's usage states; where it states none, chunks with text
 * are counted. A chunk may hold several tokens: ITL is then so much longer than TPOT.
 *
 * One thread, one libuv loop of its own. The workload is a function of the seed alone.
 */
#ifndef FATHOM_BENCH_H
#define FATHOM_BENCH_H

#include "base/base.h"

struct bench_settings {
    const char *url;      /* http[s]://host[:port][/path]; no path: /v1 */
    const char *endpoint; /* completions or chat */
    const char *model;    /* NULL: the first that /v1/models names */
    const char *api_key;  /* NULL: none */
    bool insecure;        /* https: any certificate will do */

    /* The workload. */
    const char *prompts;       /* file of lines or JSON lines; NULL: synthetic prompts */
    const char *input_tokens;  /* a distribution, see lengths.h */
    const char *output_tokens; /* a distribution */
    const char *token_ids;     /* LOW-HIGH, of synthetic prompts */
    const char *quality;       /* NULL, a tier, or a mix "full:1,balanced:3" */
    const char *extra_body;    /* NULL or a JSON object whose members every request gets */
    size_t prefix_tokens;      /* shared by all prompts */
    size_t turns;              /* requests per conversation, each with the earlier ones before it */
    double temperature;
    double cancel; /* share of the requests that are left after a random number of chunks */
    bool ignore_eos, no_stream;
    uint64_t seed;

    /* The load: lists like "1,8,32"; at most one of concurrency, rate and sweep. */
    const char *concurrency, *rate;
    bool sweep;
    const char *arrivals; /* poisson or constant */
    double burstiness;    /* shape of the gamma distribution of gaps; 1: Poisson */
    size_t requests;      /* of each point; 0: no limit but the duration */
    double duration;      /* seconds of each point; 0: no limit but the requests */
    size_t warm_up;       /* requests beforehand, not measured */
    size_t max_in_flight; /* an open loop holds requests back beyond it */
    double timeout;       /* seconds that one answer may take */

    /* The report. */
    const char *slo;               /* NULL or "ttft:200,tpot:50,e2e:5000", milliseconds */
    double lag_limit;              /* milliseconds, of the 99th percentile of our own lateness */
    const char *json, *csv, *html; /* files to write; NULL: none; "-": standard output */
};

/* Runs every point, one after another, and reports: a table on standard output (or on standard
 * error, if the former takes a file) and the files that the settings name. Returns when all is done
 * or a signal has ended it. FATHOM_INVALID: a setting is wrong, nothing was sent, and the error
 * names the flag. *valid: no point was spoiled by this program itself lagging, and not every
 * request failed. */
int bench_run(const struct bench_settings *settings, bool *valid, struct error *error);

#endif
