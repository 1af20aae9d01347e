// Declares the result of a verb, as Go passes it to C. Its memory comes from malloc and belongs to the receiver.
#ifndef OW_RESULT_H
#define OW_RESULT_H

#include <stdint.h>

struct ow_result {
	char *text;        // JSON, or NULL: nothing
	int64_t text_len;
	int64_t *numbers;
	int64_t count;
	void **managed;    // a DLManagedTensor each, NULL where there is none
	int64_t tensors;
	char *table;       // binding.PackTable's, or NULL
	uint64_t model;    // handle of a model that was opened, or 0
};

#endif
