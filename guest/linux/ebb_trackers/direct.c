// SPDX-License-Identifier: GPL-2.0-only
/*
 * A hook for blocks that are freed past the per-CPU lists, which is a few of a
 * thousand frees.
 *
 * The tracepoint mm_page_free sees them with all other frees, and costs each of
 * those about twenty instructions. So where it is known how, a probe is put on
 * the function of the allocator that frees only blocks that use no per-CPU list,
 * and single pages whose list is locked. It costs each of them some hundred
 * instructions, and nothing else anything.
 *
 * The function is static, and its parameters are only where the source has them
 * if the compiler did not change them: gcc gives such a function another name.
 * On other kernels, and where a probe is refused, it is the tracepoint. So it is
 * during a recording, in which a block's free is before what follows from it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/ptrace.h>
#include <linux/tracepoint.h>
#include <linux/version.h>

#include "direct.h"
#include "record.h"
#include "trackers.h"

/*
 * Kernels whose function is known. From 6.9 on folios are freed past
 * __free_pages_ok(); from 6.10 on all of it ends in free_one_page().
 */
#if defined(CONFIG_KPROBES) && defined(CONFIG_CC_IS_GCC) && \
	defined(CONFIG_HAVE_FUNCTION_ARG_ACCESS_API)
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 9, 0)
#define EBB_DIRECT_FUNCTION	"__free_pages_ok"
#define EBB_DIRECT_PAGE		0
#define EBB_DIRECT_ORDER	1
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0) && \
	LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
#define EBB_DIRECT_FUNCTION	"free_one_page"
#define EBB_DIRECT_PAGE		1
#define EBB_DIRECT_ORDER	3
#endif
#endif

static void (*ebb_direct_freed)(struct page *page, unsigned int order);
/* NULL if the probe is in place. */
static struct tracepoint *ebb_direct_tracepoint;

static void ebb_direct_traced(void *unused, struct page *page, unsigned int order)
{
	ebb_direct_freed(page, order);
}

#ifdef EBB_DIRECT_FUNCTION
static struct kprobe ebb_direct_probe;

static int ebb_direct_probed(struct kprobe *unused, struct pt_regs *regs)
{
	ebb_direct_freed((struct page *)regs_get_kernel_argument(regs, EBB_DIRECT_PAGE),
			 regs_get_kernel_argument(regs, EBB_DIRECT_ORDER));
	return 0;
}

static bool ebb_direct_probe_add(void)
{
	if (static_key_enabled(&ebb_recording))
		return false;
	/* A probe cannot be registered again as it was left. */
	ebb_direct_probe = (struct kprobe){
		.symbol_name = EBB_DIRECT_FUNCTION,
		.pre_handler = ebb_direct_probed,
	};
	return !register_kprobe(&ebb_direct_probe);
}

static void ebb_direct_probe_remove(void)
{
	unregister_kprobe(&ebb_direct_probe);
}

unsigned long ebb_direct_hook_missed(void)
{
	return ebb_direct_probe.nmissed;
}
#else
static bool ebb_direct_probe_add(void)
{
	return false;
}

static void ebb_direct_probe_remove(void)
{
}

unsigned long ebb_direct_hook_missed(void)
{
	return 0;
}
#endif

bool ebb_direct_hook_is_probe(void)
{
	return !ebb_direct_tracepoint;
}

int ebb_direct_hook_add(void (*freed)(struct page *page, unsigned int order))
{
	ebb_direct_freed = freed;
	ebb_direct_tracepoint = NULL;
	if (ebb_direct_probe_add())
		return 0;
	ebb_direct_tracepoint = ebb_tracepoint_find("mm_page_free");
	if (!ebb_direct_tracepoint)
		return -EOPNOTSUPP;
	return tracepoint_probe_register(ebb_direct_tracepoint, ebb_direct_traced, NULL);
}

void ebb_direct_hook_remove(void)
{
	if (ebb_direct_tracepoint)
		tracepoint_probe_unregister(ebb_direct_tracepoint, ebb_direct_traced, NULL);
	else
		ebb_direct_probe_remove();
}
