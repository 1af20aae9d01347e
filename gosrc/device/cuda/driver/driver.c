// Fills the driver's function table once, and detects forks of the process.
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

const struct owcu_api *owcu;

static volatile int forked;
static void mark_forked(void) { forked = 1; }
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void watch_forks(void) { pthread_atfork(NULL, NULL, mark_forked); }

int owcu_forked(void) { return forked; }

void owcu_use_table(const struct owcu_api *api)
{
	pthread_once(&once, watch_forks);
	__atomic_store_n(&owcu, api, __ATOMIC_RELEASE);
}

int owcu_load_driver(const char *library, char *why, size_t n)
{
	static struct owcu_api api;
	// The library is never closed, because the driver has running threads and exit handlers.
	void *lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);

	if (lib == NULL) {
		const char *text = dlerror();
		snprintf(why, n, "%s", text ? text : library);
		return -1;
	}
#define OWCU_FILL(field, symbol, args)                                                                                 \
	*(void **)&api.field = dlsym(lib, symbol);                                                                     \
	if (api.field == NULL) {                                                                                       \
		snprintf(why, n, "%s has no %s", library, symbol);                                                     \
		return -1;                                                                                             \
	}
	OWCU_FUNCTIONS(OWCU_FILL)
#undef OWCU_FILL
	owcu_use_table(&api);
	return 0;
}
