//! Finds the kernel that the virtual host and its guests run: Debian's cloud kernel package, or one that is named.

use std::cmp::Ordering;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::HostError;
use crate::extract_vmlinux::kernel_release;

/// Names another kernel image than the newest in `/boot`.
pub const KERNEL_VARIABLE: &str = "EBB_KERNEL";
/// Names another modules directory than `/lib/modules/RELEASE`.
pub const MODULES_VARIABLE: &str = "EBB_MODULES";

/// An installed kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The bzImage.
    pub image: PathBuf,
    /// Its release, as `uname -r` prints it.
    pub release: String,
    /// Its modules.
    pub modules: PathBuf,
}

impl Kernel {
    /// The kernel at `chosen`, else at `EBB_KERNEL`, else the newest `/boot/vmlinuz-*-cloud-amd64`, else the newest
    /// `/boot/vmlinuz-*-amd64`.
    pub fn find(chosen: Option<&Path>) -> Result<Self, HostError> {
        let named = chosen.map(Path::to_owned).or_else(|| env::var_os(KERNEL_VARIABLE).map(PathBuf::from));
        match named {
            Some(image) => Self::at(&image),
            None => Self::at(&newest(Path::new("/boot"))?),
        }
    }

    /// The kernel whose release is `release`, in `/boot`.
    pub fn of_release(release: &str) -> Result<Self, HostError> {
        Self::at(&Path::new("/boot").join(format!("vmlinuz-{release}")))
    }

    fn at(image: &Path) -> Result<Self, HostError> {
        if !image.exists() {
            return Err(HostError::KernelMissing { looked_for: image.display().to_string() });
        }
        let unusable = |reason: String| HostError::KernelUnusable { path: image.to_owned(), reason };
        let head = read_head(image).map_err(|error| unusable(error.to_string()))?;
        let release = kernel_release(&head).map_err(|error| unusable(error.to_string()))?;
        let modules = env::var_os(MODULES_VARIABLE)
            .map_or_else(|| Path::new("/lib/modules").join(&release), PathBuf::from);
        if !modules.join("modules.dep").exists() {
            return Err(HostError::ModulesMissing { release, path: modules });
        }
        Ok(Self { image: image.to_owned(), release, modules })
    }
}

/// The part of an image that holds the setup header and the version string.
fn read_head(image: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut head = Vec::new();
    fs::File::open(image)?.take(128 << 10).read_to_end(&mut head)?;
    Ok(head)
}

fn newest(boot: &Path) -> Result<PathBuf, HostError> {
    let names: Vec<String> = fs::read_dir(boot)
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    pick_newest(&names).map(|name| boot.join(name)).ok_or_else(|| HostError::KernelMissing {
        looked_for: boot.join("vmlinuz-*-cloud-amd64").display().to_string(),
    })
}

/// The newest cloud kernel of these file names, else the newest other amd64 kernel.
fn pick_newest(names: &[String]) -> Option<&String> {
    let newest_with = |suffix: &str| {
        names
            .iter()
            .filter(|name| name.starts_with("vmlinuz-") && name.ends_with(suffix))
            .max_by(|a, b| compare_versions(a, b))
    };
    newest_with("-cloud-amd64").or_else(|| newest_with("-amd64"))
}

/// Orders version strings: runs of digits by value, the rest by character.
fn compare_versions(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    loop {
        let (Some(&x), Some(&y)) = (a.first(), b.first()) else { return a.len().cmp(&b.len()) };
        let order = if x.is_ascii_digit() && y.is_ascii_digit() {
            let (left, right) = (take_number(&mut a), take_number(&mut b));
            left.len().cmp(&right.len()).then_with(|| left.cmp(right))
        } else {
            (a, b) = (&a[1..], &b[1..]);
            x.cmp(&y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

/// Takes a run of digits off the front, without leading zeros.
fn take_number<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    *text = rest;
    let zeros = digits.iter().take_while(|byte| **byte == b'0').count();
    &digits[zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert_eq!(compare_versions("6.1.0-9", "6.1.0-56"), Ordering::Less);
        assert_eq!(compare_versions("6.12.1", "6.2.1"), Ordering::Greater);
        assert_eq!(compare_versions("6.1", "6.1.1"), Ordering::Less);
        assert_eq!(compare_versions("6.01", "6.1"), Ordering::Equal);
    }

    #[test]
    fn cloud_kernels_come_first() {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let all = names(&[
            "vmlinuz-6.1.0-9-cloud-amd64",
            "vmlinuz-6.1.0-56-cloud-amd64",
            "vmlinuz-6.12.0-1-amd64",
            "config-6.99-cloud-amd64",
        ]);
        assert_eq!(pick_newest(&all), Some(&all[1]));
        assert_eq!(pick_newest(&all[2..]), Some(&all[2]));
        assert_eq!(pick_newest(&all[3..]), None);
    }

    #[test]
    fn a_named_kernel_that_is_missing_or_wrong_is_named() {
        let missing = Kernel::find(Some(Path::new("/no/such/vmlinuz"))).unwrap_err().to_string();
        assert!(missing.contains("/no/such/vmlinuz") && missing.contains("apt-get"), "{missing}");
        let wrong = Kernel::find(Some(Path::new("/bin/sh"))).unwrap_err().to_string();
        assert!(wrong.contains("/bin/sh") && wrong.contains("bzImage"), "{wrong}");
    }
}
