/* fathom: one binary, one sub-command each in cmd_NAME.c. */
#include "server/command.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"serve", cmd_serve, "answer completions over HTTP"},
    {"generate", cmd_generate, "complete one prompt, no server"},
    {"eval", cmd_eval, "perplexity, skip rates and FLOPs of a text, per tier"},
    {"calibrate", cmd_calibrate, "find the tiers' thresholds and write depth.json"},
    {"inspect", cmd_inspect, "what a checkpoint is, its memory and its tiers"},
    {"bench", cmd_bench, "put load on any OpenAI-compatible server and measure it"},
};
enum { COMMAND_COUNT = sizeof commands / sizeof *commands };

static void print_help(FILE *out) {
    fprintf(out, "Fathom %s: language model serving where every token gets the depth it needs\n\n",
            FATHOM_VERSION);
    fprintf(out, "usage: fathom COMMAND ...\n\n");
    for (int i = 0; i < COMMAND_COUNT; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(
        out,
        "\n'fathom COMMAND --help' explains one. Start with: fathom serve models/fathom-tiny\n");
}

static int run_command(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("fathom %s\n", FATHOM_VERSION);
        return EXIT_OK;
    }
    const char *names[COMMAND_COUNT];
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
        names[i] = commands[i].name;
    }
    const char *near = flags_suggest(argv[1], names, COMMAND_COUNT);
    fprintf(stderr, "fathom: unknown command '%s'%s%s%s; see 'fathom --help'\n", argv[1],
            near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "");
    return EXIT_USAGE;
}

/* Whatever a command printed must have arrived: a full disk may show only here. */
static int finish_output(void) {
    bool failed_before = ferror(stdout);
    if (fflush(stdout) == 0 && !failed_before) return EXIT_OK;
    fprintf(stderr, "fathom: standard output: %s\n",
            failed_before ? "some of it could not be written" : strerror(errno));
    return EXIT_FAILED;
}

/* Model files are mapped: who cuts one short while it is read takes pages away that were there. */
static void on_bus_error(int number) {
    static const char message[] =
        "fathom: a file was cut short while it was read; write models beside and rename them\n";
    ssize_t written = write(STDERR_FILENO, message, sizeof message - 1);
    (void)written;
    (void)number;
    _exit(EXIT_FAILED);
}

int main(int argc, char **argv) {
    signal(SIGBUS, on_bus_error);
    int code = run_command(argc, argv);
    return code == EXIT_OK ? finish_output() : code;
}
