/* fathom bench: flags to settings, then the load generator. */
#include "server/command.h"

#include "bench/bench.h"

static const struct bench_settings settings_default = {
    .endpoint = "completions",
    .input_tokens = "128",
    .output_tokens = "64",
    .token_ids = "10-255",
    .turns = 1,
    .seed = 1,
    .arrivals = "poisson",
    .burstiness = 1,
    .requests = 100,
    .max_in_flight = 4096,
    .timeout = 600,
    .lag_limit = 20,
};

int cmd_bench(int argc, char **argv) {
    struct bench_settings s = settings_default;
    const struct flag flags[] = {
        {"concurrency", 'c', FLAG_TEXT, "N,..", "closed loop: so many at once, point by point (8)",
         &s.concurrency, 0, 0},
        {"rate", 'r', FLAG_TEXT, "R,..", "open loop: so many start per second, point by point",
         &s.rate, 0, 0},
        {"sweep", 0, FLAG_SWITCH, NULL, "find the peak, then the knee below it", &s.sweep, 0, 0},
        {"arrivals", 0, FLAG_TEXT, "A", "of an open loop: poisson or constant (poisson)",
         &s.arrivals, 0, 0},
        {"burstiness", 0, FLAG_REAL, "B", "gamma shape of their gaps, under 1: bursts (1)",
         &s.burstiness, 0.01, 1000},
        {"requests", 'n', FLAG_COUNT, "N", "of each point, 0 for no limit (100)", &s.requests, 0,
         1e9},
        {"duration", 'd', FLAG_REAL, "S", "seconds of each point, 0 for no limit (0)", &s.duration,
         0, 604800},
        {"warm-up", 0, FLAG_COUNT, "N", "requests beforehand, not measured (0)", &s.warm_up, 0,
         1000000},
        {"endpoint", 0, FLAG_TEXT, "E", "completions or chat (completions)", &s.endpoint, 0, 0},
        {"model", 'm', FLAG_TEXT, "NAME", "(the first that the server lists)", &s.model, 0, 0},
        {"api-key", 0, FLAG_TEXT, "KEY", "better in the environment: FATHOM_API_KEY (none)",
         &s.api_key, 0, 0},
        {"insecure", 0, FLAG_SWITCH, NULL, "https: check no certificate", &s.insecure, 0, 0},
        {"prompts", 0, FLAG_TEXT, "FILE", "lines of text, or of {\"prompt\":..,\"max_tokens\":..}",
         &s.prompts, 0, 0},
        {"input-tokens", 'i', FLAG_TEXT, "LENGTH", "of synthetic prompts (128)", &s.input_tokens, 0,
         0},
        {"output-tokens", 'o', FLAG_TEXT, "LENGTH", "max_tokens (64)", &s.output_tokens, 0, 0},
        {"token-ids", 0, FLAG_TEXT, "LOW-HIGH", "of synthetic prompts (10-255)", &s.token_ids, 0,
         0},
        {"prefix-tokens", 0, FLAG_COUNT, "N", "that all prompts begin with (0)", &s.prefix_tokens,
         0, 1048576},
        {"turns", 0, FLAG_COUNT, "N", "per conversation, each repeats the earlier (1)", &s.turns, 1,
         1000},
        {"quality", 'q', FLAG_TEXT, "TIER", "one, auto, or a mix: full:1,balanced:3 (none)",
         &s.quality, 0, 0},
        {"temperature", 0, FLAG_REAL, "T", "(0)", &s.temperature, 0, 2},
        {"ignore-eos", 0, FLAG_SWITCH, NULL, "ask for answers of full length", &s.ignore_eos, 0, 0},
        {"no-stream", 0, FLAG_SWITCH, NULL, "whole answers: no TTFT, TPOT, ITL", &s.no_stream, 0,
         0},
        {"cancel", 0, FLAG_REAL, "SHARE", "of requests left in mid-stream (0)", &s.cancel, 0, 1},
        {"extra-body", 0, FLAG_TEXT, "JSON", "members that every request gets (none)",
         &s.extra_body, 0, 0},
        {"seed", 0, FLAG_SEED, "N", "of the workload and the arrivals (1)", &s.seed, 0, 0},
        {"timeout", 0, FLAG_REAL, "S", "that an answer may take (600)", &s.timeout, 0.1, 86400},
        {"max-in-flight", 0, FLAG_COUNT, "N", "of an open loop; more wait (4096)", &s.max_in_flight,
         1, 65536},
        {"slo", 0, FLAG_TEXT, "LIMITS", "for goodput, ms: ttft:200,tpot:50,e2e:5000 (none)", &s.slo,
         0, 0},
        {"lag-limit", 0, FLAG_REAL, "MS", "own lateness, p99, that spoils a run (20)", &s.lag_limit,
         0.1, 60000},
        {"json", 0, FLAG_TEXT, "FILE", "summary of each point; - is standard output", &s.json, 0,
         0},
        {"csv", 0, FLAG_TEXT, "FILE", "a line for each request", &s.csv, 0, 0},
        {"html", 0, FLAG_TEXT, "FILE", "a page with plots, self-contained", &s.html, 0, 0},
    };
    const struct command command = {
        .name = "bench",
        .usage = "URL [flags]",
        .summary = "Puts load on any OpenAI-compatible server: URL is http[s]://HOST[:PORT][/v1]. "
                   "LENGTH is N,\nLOW-HIGH, normal:MEAN:DEVIATION, lognormal:MEAN:DEVIATION or "
                   "exponential:MEAN.\nThe same seed asks the same. Exit code 1: this program "
                   "itself lagged, or nothing was answered.",
        .examples = "  fathom bench http://127.0.0.1:8080 -c 1,8,32 -n 200 --ignore-eos\n"
                    "  fathom bench http://127.0.0.1:8080 -r 5 -d 60 -q full:1,balanced:3 --html "
                    "run.html",
        .flags = flags,
        .flag_count = sizeof flags / sizeof *flags,
        .positional_count = 1,
        .positionals = &s.url,
    };
    struct error error = {0};
    int result = flags_parse(&command, argc, argv, &error);
    if (result == FLAGS_HELP) return EXIT_OK;
    if (result != 0) return command_fail("bench", &error, EXIT_USAGE);
    bool valid = false;
    result = bench_run(&s, &valid, &error);
    if (result != 0) {
        return command_fail("bench", &error, result == FATHOM_INVALID ? EXIT_USAGE : EXIT_FAILED);
    }
    return valid ? EXIT_OK : EXIT_FAILED;
}
