//! Words for the kernel command line of a guest that boots faster and occupies less memory
//! (`ebb run --lean`, docs/boot.md).

/// A word of the kernel command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeanWord {
    /// The word: a parameter, with its value if it has one.
    pub word: &'static str,
    /// What the guest saves by it.
    pub reason: &'static str,
}

/// The words, from the largest effect to the smallest. None of them turns off a protection.
pub const LEAN_WORDS: [LeanWord; 4] = [
    LeanWord {
        word: "cryptomgr.notests",
        reason: "no self-tests of the kernel's ciphers: half of the instructions of a boot",
    },
    LeanWord {
        word: "swiotlb=noforce",
        reason: "no bounce buffer: 64 MiB, which virtio devices of a monitor never use",
    },
    LeanWord {
        word: "quiet",
        reason: "no messages on the serial line: each character is an exit of the vCPU",
    },
    LeanWord {
        word: "8250.nr_uarts=1",
        reason: "no search for serial lines that the machine does not have: 100 exits",
    },
];

/// The command line with the lean words before its own.
///
/// The kernel uses the last value of a parameter, so that a value of `cmdline` wins; a parameter
/// that it mentions is not added.
pub fn with_lean_words(cmdline: &str) -> String {
    let is_given = |word: &str| {
        cmdline.split_ascii_whitespace().any(|given| parameter(given) == parameter(word))
    };
    let added = LEAN_WORDS.iter().map(|lean| lean.word).filter(|word| !is_given(word));
    let words: Vec<&str> = added.chain([cmdline]).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

/// The name of the parameter that a word sets. `-` and `_` are the same (Linux kernel/params.c).
fn parameter(word: &str) -> String {
    word.split('=').next().unwrap_or_default().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_before_those_of_the_user() {
        assert_eq!(
            with_lean_words("console=ttyS0 root=/dev/vda -- single"),
            "cryptomgr.notests swiotlb=noforce quiet 8250.nr_uarts=1 console=ttyS0 root=/dev/vda \
             -- single"
        );
        assert!(with_lean_words("").ends_with("nr_uarts=1"));
    }

    #[test]
    fn parameters_of_the_user_win() {
        assert_eq!(
            with_lean_words("swiotlb=65536 8250.nr-uarts=2 quiet"),
            "cryptomgr.notests swiotlb=65536 8250.nr-uarts=2 quiet"
        );
    }

    #[test]
    fn every_word_is_documented() {
        let text = include_str!("../../../../docs/boot.md");
        for lean in LEAN_WORDS {
            assert!(text.contains(&format!("| `{}` |", lean.word)), "{}", lean.word);
        }
    }
}
