/* The service manager's side of the process: systemd's protocols, which are a few environment
 * variables and a datagram socket. Without those variables nothing here has an effect.
 *
 *   LISTEN_FDS, LISTEN_PID      the listening socket is descriptor 3, opened by the manager, who
 *                               keeps it across restarts (sd_listen_fds)
 *   NOTIFY_SOCKET               where states are told: READY=1, STOPPING=1 (sd_notify)
 *   WATCHDOG_USEC, WATCHDOG_PID the manager restarts a process that is silent for so long
 *                               (sd_watchdog_enabled)
 */
#ifndef FATHOM_SERVICE_H
#define FATHOM_SERVICE_H

#include <sys/socket.h>
#include <sys/un.h>

#include "base/base.h"

struct service {
    int listener; /* descriptor, or -1: listen on --host and --port */
    int notify;   /* descriptor, or -1: nobody is told */
    struct sockaddr_un manager;
    socklen_t manager_length;
    uint64_t watchdog_ns; /* 0: none */
    uint64_t alive_ns;    /* time_now_ns of the last sign of life */
};

/* Reads the environment. FATHOM_INVALID: what the manager gave is no one listening TCP socket. */
int service_open(struct service *service, struct error *error);
void service_close(struct service *service);

/* "READY=1"; never blocks. */
void service_notify(struct service *service, const char *state);

/* To be called several times a second: a sign of life when it is time and all is well. */
void service_watch(struct service *service, bool is_healthy);

#endif
