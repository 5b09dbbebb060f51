#include "server/service.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LISTEN_FDS_START 3

/* A whole number in the environment; 0 if there is none. */
static uint64_t environment_number(const char *name) {
    const char *text = getenv(name);
    char *end;
    if (!text || *text < '0' || *text > '9') return 0;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0' ? number : 0;
}

/* The variables are for one process, not for those it starts. */
static bool is_for_us(const char *name) {
    return environment_number(name) == (uint64_t)getpid();
}

static int take_listener(struct service *service, struct error *error) {
    uint64_t count = is_for_us("LISTEN_PID") ? environment_number("LISTEN_FDS") : 0;
    struct sockaddr_storage address;
    socklen_t address_length = sizeof address, listens_length = sizeof(int);
    int fd = LISTEN_FDS_START, listens = 0;
    if (count == 0) return 0;
    if (count > 1) {
        return error_set(error, FATHOM_INVALID, "LISTEN_FDS is %llu; one socket is taken",
                         (unsigned long long)count);
    }
    bool is_tcp = getsockname(fd, (struct sockaddr *)&address, &address_length) == 0 &&
                  (address.ss_family == AF_INET || address.ss_family == AF_INET6) &&
                  getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &listens_length) == 0;
    if (!is_tcp || !listens) {
        return error_set(
            error, FATHOM_INVALID,
            "the socket in LISTEN_FDS does not listen for TCP (ListenStream=PORT does)");
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    service->listener = fd;
    return 0;
}

/* A path, or '@' and a name that is in no file system. */
static void find_manager(struct service *service) {
    const char *path = getenv("NOTIFY_SOCKET");
    size_t length = path ? strlen(path) : 0;
    if (length < 2 || length >= sizeof service->manager.sun_path) return;
    if (path[0] != '/' && path[0] != '@') return;
    service->manager.sun_family = AF_UNIX;
    memcpy(service->manager.sun_path, path, length);
    if (path[0] == '@') service->manager.sun_path[0] = '\0';
    service->manager_length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    service->notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

int service_open(struct service *service, struct error *error) {
    *service = (struct service){.listener = -1, .notify = -1};
    find_manager(service);
    if (!getenv("WATCHDOG_PID") || is_for_us("WATCHDOG_PID")) {
        uint64_t microseconds = environment_number("WATCHDOG_USEC");
        if (microseconds <= UINT64_MAX / 1000) service->watchdog_ns = microseconds * 1000;
    }
    return take_listener(service, error);
}

void service_close(struct service *service) {
    if (service->notify >= 0) close(service->notify);
    service->notify = -1;
}

void service_notify(struct service *service, const char *state) {
    if (service->notify < 0) return;
    sendto(service->notify, state, strlen(state), MSG_DONTWAIT | MSG_NOSIGNAL,
           (const struct sockaddr *)&service->manager, service->manager_length);
}

void service_watch(struct service *service, bool is_healthy) {
    uint64_t now_ns = time_now_ns();
    /* Twice within the time allowed is what the manager's manual asks for. */
    if (service->watchdog_ns == 0 || !is_healthy) return;
    if (now_ns - service->alive_ns < service->watchdog_ns / 2) return;
    service->alive_ns = now_ns;
    service_notify(service, "WATCHDOG=1");
}
