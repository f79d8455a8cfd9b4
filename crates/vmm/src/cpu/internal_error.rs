//! The reason that KVM gives for a guest that it cannot run any longer (`KVM_EXIT_INTERNAL_ERROR`,
//! Linux Documentation/virt/kvm/api.rst, section 5).

use std::fmt::Write as _;

use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_SIMUL_EX, KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON, kvm_run,
};

/// The cause of an internal error and its numbers, whose meaning depends on cause and kernel.
/// `None` if `run` is of another exit.
pub fn describe(run: &kvm_run) -> Option<String> {
    if run.exit_reason != KVM_EXIT_INTERNAL_ERROR {
        return None;
    }
    // SAFETY: KVM fills in this member of the union for this exit, and all its values are numbers.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let cause = match internal.suberror {
        KVM_INTERNAL_ERROR_EMULATION => "an instruction that KVM cannot emulate",
        KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions at a time",
        KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit during the delivery of an event",
        KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "an unexpected exit",
        _ => "an unknown cause",
    };
    let mut text = format!("internal error {}, {cause}", internal.suberror);
    for (at, number) in internal.data.iter().take(internal.ndata as usize).enumerate() {
        let _ = write!(text, "{}{number:#x}", if at == 0 { ": " } else { " " });
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_and_its_numbers_are_named() {
        let mut run = kvm_run { exit_reason: KVM_EXIT_INTERNAL_ERROR, ..Default::default() };
        // SAFETY: all values of this member are numbers.
        let internal = unsafe { &mut run.__bindgen_anon_1.internal };
        (internal.suberror, internal.ndata) = (KVM_INTERNAL_ERROR_DELIVERY_EV, 2);
        internal.data[..3].copy_from_slice(&[0x8000_0030, 0x400, 7]);
        let text = describe(&run).unwrap();
        assert_eq!(
            text,
            "internal error 3, an exit during the delivery of an event: 0x80000030 0x400"
        );
        run.__bindgen_anon_1.internal.ndata = u32::MAX;
        assert!(describe(&run).unwrap().ends_with(&" 0x0".repeat(13)));
        run.exit_reason = 0;
        assert_eq!(describe(&run), None);
    }
}
