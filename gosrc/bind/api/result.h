// Declares the result of a verb, which Go passes to C. Its memory is from malloc, and the receiver owns it.
#ifndef OW_RESULT_H
#define OW_RESULT_H

#include <stdint.h>

struct ow_result {
	char *text;        // JSON, or NULL
	int64_t text_len;
	int64_t *numbers;
	int64_t count;
	void **managed;    // DLManagedTensors; NULL for missing tensors
	int64_t tensors;
	char *table;       // written by binding.PackTable, or NULL
	uint64_t model;    // handle of an opened model, or 0
};

#endif
