// SPDX-License-Identifier: GPL-2.0-only
/*
 * Addresses of kernel functions that are not exported.
 *
 * kallsyms_lookup_name() is not available to modules, but a kprobe is given
 * by name and, once registered, has the address. It is registered disabled:
 * no instruction of the kernel is changed.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mutex.h>
#include <linux/string.h>
#include <linux/tracepoint.h>

#include "symbols.h"

struct ebb_symbols ebb_symbols;

static DEFINE_MUTEX(ebb_symbols_mutex);

static void *ebb_symbol(const char *name)
{
	struct kprobe probe = {
		.symbol_name = name,
		.flags = KPROBE_FLAG_DISABLED,
	};
	void *address;
	int err;

	err = register_kprobe(&probe);
	if (err) {
		pr_warn("kernel function %s cannot be found (error %d)\n", name, err);
		return NULL;
	}
	address = probe.addr;
	unregister_kprobe(&probe);
	/* That may be behind an ENDBR, where a call that is not checked may go as well. */
	return address;
}

/*
 * Where the processor checks the targets of indirect calls, a function whose address the kernel
 * itself never takes has no valid beginning: it was sealed at boot.
 */
static bool ebb_calls_are_checked(void)
{
#ifdef CONFIG_X86_KERNEL_IBT
	if (cpu_feature_enabled(X86_FEATURE_IBT))
		return true;
#endif
	return IS_ENABLED(CONFIG_CFI_CLANG) || IS_ENABLED(CONFIG_CFI);
}

int ebb_symbols_find(void)
{
	struct ebb_symbols found;
	int err = 0;

	if (ebb_calls_are_checked()) {
		pr_info_once("this kernel checks indirect calls: functions that are not exported are not used\n");
		return -EOPNOTSUPP;
	}

	mutex_lock(&ebb_symbols_mutex);
	if (ebb_symbols.isolate_free_page)
		goto out;

	found.isolate_free_page = ebb_symbol("__isolate_free_page");
	found.putback_isolated_page = ebb_symbol("__putback_isolated_page");
	found.migratetype = ebb_symbol(EBB_MIGRATETYPE_FUNCTION);
	if (found.isolate_free_page && found.putback_isolated_page && found.migratetype)
		ebb_symbols = found;
	else
		err = -EOPNOTSUPP;
out:
	mutex_unlock(&ebb_symbols_mutex);
	return err;
}

struct ebb_tracepoint_search {
	const char *name;
	struct tracepoint *found;
};

static void ebb_tracepoint_compare(struct tracepoint *tp, void *data)
{
	struct ebb_tracepoint_search *search = data;

	if (!strcmp(tp->name, search->name))
		search->found = tp;
}

struct tracepoint *ebb_tracepoint_find(const char *name)
{
	struct ebb_tracepoint_search search = { .name = name };

	for_each_kernel_tracepoint(ebb_tracepoint_compare, &search);
	if (!search.found)
		pr_warn("kernel tracepoint %s cannot be found\n", name);
	return search.found;
}
