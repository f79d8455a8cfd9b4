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
#ifdef CONFIG_X86_KERNEL_IBT
#include <asm/ibt.h>
#endif

#include "symbols.h"

struct ebb_symbols ebb_symbols;

static DEFINE_MUTEX(ebb_symbols_mutex);

static void *ebb_symbol(const char *name)
{
	struct kprobe probe = {
		.symbol_name = name,
		.flags = KPROBE_FLAG_DISABLED,
	};
	u8 *address;
	int err;

	err = register_kprobe(&probe);
	if (err) {
		pr_warn("kernel function %s cannot be found (error %d)\n", name, err);
		return NULL;
	}
	address = (u8 *)probe.addr;
	unregister_kprobe(&probe);

#ifdef CONFIG_X86_KERNEL_IBT
	/* A probe at a function's beginning goes behind its ENDBR; a call must not. */
	if (is_endbr(*(u32 *)(address - ENDBR_INSN_SIZE)))
		address -= ENDBR_INSN_SIZE;
#endif
	return address;
}

int ebb_symbols_find(void)
{
	struct ebb_symbols found;
	int err = 0;

	mutex_lock(&ebb_symbols_mutex);
	if (ebb_symbols.isolate_free_page)
		goto out;

	found.isolate_free_page = ebb_symbol("__isolate_free_page");
	found.putback_isolated_page = ebb_symbol("__putback_isolated_page");
	found.pageblock_flags = ebb_symbol("get_pfnblock_flags_mask");
	if (found.isolate_free_page && found.putback_isolated_page && found.pageblock_flags)
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
