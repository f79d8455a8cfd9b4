//! Finds the kernel of guests, which is Debian's cloud kernel or a chosen one, and that of the
//! virtual host, which may be a newer one in a separate directory.

use std::cmp::Ordering;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ebb_vmlinux::kernel_release;

use crate::error::HostError;

/// Environment variable for a kernel image other than the newest in `/boot`.
pub const KERNEL_VARIABLE: &str = "EBB_KERNEL";
/// Environment variable for a modules directory other than `/lib/modules/RELEASE`.
pub const MODULES_VARIABLE: &str = "EBB_MODULES";
/// Environment variable for a kernel image of virtual hosts other than the newest one.
pub const HOST_KERNEL_VARIABLE: &str = "EBB_HOST_KERNEL";
/// Directory where `scripts/install-deps.sh` unpacks newer kernels for virtual hosts, so that this
/// machine does not boot them: one subdirectory each, with `boot` and `lib/modules` as in Debian's
/// package.
pub const KERNELS_DIRECTORY: &str = "/var/lib/ebb/kernels";

/// Choice of a virtual host's kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum HostKernel {
    /// The guests' kernel.
    #[default]
    OfGuests,
    /// `EBB_HOST_KERNEL`, else the newest in [`KERNELS_DIRECTORY`] if that is newer than the
    /// guests' kernel.
    Newest,
    /// This image.
    At(PathBuf),
}

impl FromStr for HostKernel {
    type Err = HostError;

    /// Parses `guests`, `newest` or an absolute path.
    fn from_str(text: &str) -> Result<Self, HostError> {
        match text {
            "guests" => Ok(Self::OfGuests),
            "newest" => Ok(Self::Newest),
            path if path.contains('/') => Ok(Self::At(path.into())),
            other => Err(HostError::Configuration(format!(
                "host kernel `{other}`: expected `guests`, `newest` or the path of a kernel image"
            ))),
        }
    }
}

impl HostKernel {
    /// Resolves the choice if guests run `of_guests`.
    pub fn find(&self, of_guests: &Kernel) -> Result<Kernel, HostError> {
        match self {
            Self::OfGuests => Ok(of_guests.clone()),
            Self::At(image) => Kernel::in_tree(image),
            Self::Newest => match env::var_os(HOST_KERNEL_VARIABLE) {
                Some(image) => Kernel::in_tree(Path::new(&image)),
                None => Ok(newest_of_hosts(Path::new(KERNELS_DIRECTORY), of_guests)),
            },
        }
    }
}

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
    /// The kernel at `chosen`, else at `EBB_KERNEL`, else the newest
    /// `/boot/vmlinuz-*-cloud-amd64`, else the newest `/boot/vmlinuz-*-amd64`.
    pub fn find(chosen: Option<&Path>) -> Result<Self, HostError> {
        let named =
            chosen.map(Path::to_owned).or_else(|| env::var_os(KERNEL_VARIABLE).map(PathBuf::from));
        match named {
            Some(image) => Self::at(&image),
            None => Self::at(&newest(Path::new("/boot"))?),
        }
    }

    /// The kernel with this release in `/boot`.
    pub fn of_release(release: &str) -> Result<Self, HostError> {
        Self::at(&Path::new("/boot").join(format!("vmlinuz-{release}")))
    }

    fn at(image: &Path) -> Result<Self, HostError> {
        let release = release_of(image)?;
        let modules = env::var_os(MODULES_VARIABLE)
            .map_or_else(|| Path::new("/lib/modules").join(&release), PathBuf::from);
        Self::with_modules(image, release, modules)
    }

    /// The kernel `ROOT/boot/NAME` with the modules in `ROOT/lib/modules`, else in `/lib/modules`.
    fn in_tree(image: &Path) -> Result<Self, HostError> {
        let release = release_of(image)?;
        let beside = image.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
        let beside = beside.join("lib/modules").join(&release);
        let modules =
            if beside.is_dir() { beside } else { Path::new("/lib/modules").join(&release) };
        Self::with_modules(image, release, modules)
    }

    fn with_modules(image: &Path, release: String, modules: PathBuf) -> Result<Self, HostError> {
        if !modules.join("modules.dep").exists() {
            return Err(HostError::ModulesMissing { release, path: modules });
        }
        Ok(Self { image: image.to_owned(), release, modules })
    }
}

/// The release in the header of an image.
fn release_of(image: &Path) -> Result<String, HostError> {
    if !image.exists() {
        return Err(HostError::KernelMissing { looked_for: image.display().to_string() });
    }
    let unusable = |reason: String| HostError::KernelUnusable { path: image.to_owned(), reason };
    let head = read_head(image).map_err(|error| unusable(error.to_string()))?;
    kernel_release(&head).map_err(|error| unusable(error.to_string()))
}

/// The newest kernel below `kernels`, or `of_guests` if none is newer.
fn newest_of_hosts(kernels: &Path, of_guests: &Kernel) -> Kernel {
    let mut newest = of_guests.clone();
    for tree in fs::read_dir(kernels).into_iter().flatten().flatten() {
        // Incomplete kernels are skipped.
        let found =
            self::newest(&tree.path().join("boot")).and_then(|image| Kernel::in_tree(&image));
        let Ok(kernel) = found else { continue };
        if compare_versions(&kernel.release, &newest.release) == Ordering::Greater {
            newest = kernel;
        }
    }
    newest
}

/// Whether `release`, as `uname -r` prints it, is Linux `major.minor` or newer.
pub fn is_at_least(release: &str, major: u32, minor: u32) -> bool {
    compare_versions(release, &format!("{major}.{minor}")) != Ordering::Less
}

/// The part of an image with the setup header and the version string.
fn read_head(image: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut head = Vec::new();
    fs::File::open(image)?.take(128 << 10).read_to_end(&mut head)?;
    Ok(head)
}

fn newest(boot: &Path) -> Result<PathBuf, HostError> {
    let names: Vec<String> = fs::read_dir(boot)
        .map(|entries| {
            entries
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect()
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

/// Removes a run of digits from the front and returns it without leading zeros.
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
    fn cloud_kernels_are_preferred() {
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
    fn releases_are_compared_with_versions() {
        for (release, at_least) in [
            ("6.1.0-56-cloud-amd64", false),
            ("5.19", false),
            ("6.8", true),
            ("6.8.0-1", true),
            ("6.12.95+deb12-cloud-amd64", true),
            ("7.0", true),
        ] {
            assert_eq!(is_at_least(release, 6, 8), at_least, "{release}");
        }
    }

    /// The part of a bzImage that contains its release.
    fn image(release: &str) -> Vec<u8> {
        let mut image = vec![0; 1024];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image[0x300..0x300 + release.len()].copy_from_slice(release.as_bytes());
        image
    }

    fn install(root: &Path, release: &str) -> PathBuf {
        let modules = root.join("lib/modules").join(release);
        fs::create_dir_all(&modules).unwrap();
        fs::create_dir_all(root.join("boot")).unwrap();
        fs::write(modules.join("modules.dep"), "").unwrap();
        let path = root.join("boot").join(format!("vmlinuz-{release}"));
        fs::write(&path, image(release)).unwrap();
        path
    }

    #[test]
    fn hosts_get_the_newest_unpacked_kernel_if_newer_than_the_guests() {
        let directory = tempfile::tempdir().unwrap();
        let of_guests = |release: &str| Kernel {
            image: "/boot/guests".into(),
            release: release.to_owned(),
            modules: "/lib/modules/guests".into(),
        };
        let newest = |guests: &str| newest_of_hosts(directory.path(), &of_guests(guests));
        assert_eq!(newest("6.1.0-56-cloud-amd64").image, Path::new("/boot/guests"));
        let [old, new] = ["6.9.1-cloud-amd64", "6.12.95+deb12-cloud-amd64"]
            .map(|release| install(&directory.path().join(release), release));
        // An incomplete installation.
        let unfinished = install(&directory.path().join(".new"), "6.99-cloud-amd64");
        fs::remove_file(unfinished.with_file_name("../lib/modules/6.99-cloud-amd64/modules.dep"))
            .unwrap();
        let found = newest("6.1.0-56-cloud-amd64");
        assert_eq!(
            (found.image.as_path(), found.release.as_str()),
            (new.as_path(), "6.12.95+deb12-cloud-amd64")
        );
        assert!(found.modules.starts_with(directory.path()), "{found:?}");
        assert_eq!(newest("6.13.0-1-cloud-amd64").image, Path::new("/boot/guests"));
        let at = HostKernel::At(old.clone()).find(&of_guests("6.13")).unwrap();
        assert_eq!((at.image, at.release.as_str()), (old, "6.9.1-cloud-amd64"));
        assert_eq!(HostKernel::OfGuests.find(&of_guests("6.13")).unwrap(), of_guests("6.13"));
    }

    #[test]
    fn host_kernels_parse() {
        assert_eq!("guests".parse::<HostKernel>().unwrap(), HostKernel::OfGuests);
        assert_eq!("newest".parse::<HostKernel>().unwrap(), HostKernel::Newest);
        assert_eq!("./vmlinuz".parse::<HostKernel>().unwrap(), HostKernel::At("./vmlinuz".into()));
        let error = "new".parse::<HostKernel>().unwrap_err().to_string();
        assert!(error.contains("`new`") && error.contains("newest"), "{error}");
    }

    #[test]
    fn the_error_names_a_missing_or_invalid_kernel() {
        let missing = Kernel::find(Some(Path::new("/no/such/vmlinuz"))).unwrap_err().to_string();
        assert!(missing.contains("/no/such/vmlinuz") && missing.contains("apt-get"), "{missing}");
        let wrong = Kernel::find(Some(Path::new("/bin/sh"))).unwrap_err().to_string();
        assert!(wrong.contains("/bin/sh") && wrong.contains("bzImage"), "{wrong}");
    }
}
