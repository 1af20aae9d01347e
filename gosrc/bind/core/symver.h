// Binds symbols that moved to libc.so.6 in glibc 2.34 to their old versions, so that the library runs on glibc 2.17 and
// later. It is included before everything that is compiled for the wheel.
//
// The old versions are those of the first glibc for each architecture.
#if !defined(__ASSEMBLER__) && defined(__linux__)
#if defined(__x86_64__)
#define OW_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__aarch64__)
#define OW_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
#ifdef OW_OLD
OW_OLD(pthread_create);
OW_OLD(pthread_detach);
OW_OLD(pthread_join);
OW_OLD(pthread_once);
OW_OLD(pthread_sigmask);
OW_OLD(pthread_key_create);
OW_OLD(pthread_key_delete);
OW_OLD(pthread_setspecific);
OW_OLD(pthread_getspecific);
OW_OLD(pthread_attr_getstacksize);
OW_OLD(pthread_attr_getstack);
OW_OLD(pthread_getattr_np);
OW_OLD(dlopen);
OW_OLD(dlsym);
OW_OLD(dlclose);
OW_OLD(dlerror);
#endif
#endif
