/* Preloaded, this makes every thread but the main one flush subnormals to zero.
 *
 * MLX computes in threads of its own, so MLX does as Apple's GPUs do, which flush
 * float32 and bfloat16 subnormals but not float16's, and Python stays as it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <xmmintrin.h>

#define FLUSH_TO_ZERO 0x8000
#define DENORMALS_ARE_ZERO 0x0040

typedef void *(*routine)(void *);
typedef int (*creator)(pthread_t *, const pthread_attr_t *, routine, void *);

struct start {
  routine run;
  void *argument;
};

static void *run_flushing(void *given) {
  struct start start = *(struct start *)given;
  free(given);
  _mm_setcsr(_mm_getcsr() | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
  return start.run(start.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, routine run,
                   void *argument) {
  creator create = (creator)dlsym(RTLD_NEXT, "pthread_create");
  struct start *start = malloc(sizeof *start);
  if (start == NULL) {
    abort();
  }
  start->run = run;
  start->argument = argument;
  return create(thread, attributes, run_flushing, start);
}
